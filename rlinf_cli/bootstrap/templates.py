"""Templates for schedulers: a job script for Slurm, a RayCluster for KubeRay.

Both are built only from a validated file, with every value quoted for its context. Pure.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from rlinf_cli.bootstrap.inventory import NodeTarget
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.secrets import is_secret
from rlinf_core.env_vars import ADDRESS, NODE_RANK
from rlinf_core.hardware.accelerators.registry import accelerator_of_model
from rlinf_core.placement.environment import forwarded_values

# The version that the extra `train` requires.
RAY_VERSION: Final = "2.60.0"
# Resource names of the vendors' device plugins.
_DEVICE_PLUGINS: Final = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Ascend": "huawei.com/Ascend910",
    "Intel": "gpu.intel.com/xe",
    "MUSA": "mthreads.com/gpu",
}
# KubeRay's default port of the head.
_KUBERAY_GCS_PORT: Final = 6379
_IMAGE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NodeBlock(NamedTuple):
    """Consecutive equal nodes: one request for machines.

    Attributes:
        nodes: by rank.
    """

    nodes: tuple[NodeTarget, ...]

    @property
    def first(self) -> NodeTarget:
        return self.nodes[0]

    @property
    def title(self) -> str:
        """Title, `nodes 0-7: a800`, always on one line."""
        ranks = format_ranks([node.rank for node in self.nodes])
        groups = ", ".join(self.first.groups)
        return _one_line(f"node{'' if len(self.nodes) == 1 else 's'} {ranks}" + (f": {groups}" if groups else ""))


def pieces_of(nodes: Sequence[NodeTarget]) -> list[NodeBlock]:
    """Return blocks of nodes, by rank, with equal groups, interpreter and accelerators."""

    def alike(node: NodeTarget) -> tuple[Any, ...]:
        count = node.accelerators.per_node if node.accelerators else None
        return (node.groups, node.interpreter, node.declared_interpreter, count)

    return [NodeBlock(tuple(group)) for _, group in groupby(nodes, alike)]


_SLURM_START: Final = r"""
set -euo pipefail
umask 077
file={file}
overrides=({overrides})

# All nodes share the token through the home folder, which every node must mount; it lives as long as the job.
token=$HOME/.rlinf-$SLURM_JOB_ID.token
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$token"
# When the driver ends, every node takes itself down.
trap 'rm -f "$token"; kill $(jobs -p) 2> /dev/null && wait || true' EXIT
export RLINF_CLUSTER={name}

# The address of node 0 is queried there: its name may resolve to loopback.
head=$(srun {first_group}--nodes=1 --ntasks=1 hostname -I | awk '{{print $1}}')
"""
_SLURM_PIECE: Final = r"""
# {title}
srun {group}--nodes={count} --ntasks={count} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
  bash -c 'exec "$1" -m rlinf_cli up --name "$2" --node-rank "$(($3 + SLURM_NODEID))" --head-address "$4" \
    --token-file "$5" --block "${{@:6}}"' \
  node {interpreter} {name} {first} "$head" "$token" "$file" "${{overrides[@]}}" &
"""
_SLURM_END: Final = r"""
# The driver runs on node 0 once all nodes are up.
srun {first_group}--nodes=1 --ntasks=1 --overlap --cpu-bind=none \
  bash -c 'for try in {{1..90}}; do
      "$1" -m rlinf_cli status --name "$2" --quiet > /dev/null 2>&1 && exec "$1" -m rlinf_cli train "${{@:3}}"
      sleep 2
    done
    "$1" -m rlinf_cli status --name "$2"; exit 3' \
  driver {interpreter} {name} "$file" "${{overrides[@]}}"
"""


def slurm(name: str, file: str, nodes: Sequence[NodeTarget], overrides: Sequence[str] = ()) -> str:
    """Return an `sbatch` script that brings the cluster up on machines chosen by Slurm, and runs the job.

    Args:
        name: of the cluster.
        file: the configuration file as named on the command line.
        nodes: of the file, by rank.
        overrides: the command line's overrides.
    """
    pieces = pieces_of(nodes)
    several = len(pieces) > 1
    lines = ["#!/bin/bash", f"#SBATCH --job-name={name}"]
    for index, piece in enumerate(pieces):
        if index:
            lines.append("#SBATCH hetjob")
        lines += [f"# {piece.title}", *_requests(piece)]

    def group(index: int) -> str:
        return f"--het-group={index} " if several else ""

    first = _interpreter(pieces[0])
    script = [
        "\n".join(lines) + "\n",
        _SLURM_START.format(
            file=shlex.quote(file), overrides=shlex.join(overrides), name=shlex.quote(name), first_group=group(0)
        ),
    ]
    for index, piece in enumerate(pieces):
        script.append(
            _SLURM_PIECE.format(
                title=piece.title,
                group=group(index),
                count=len(piece.nodes),
                interpreter=_interpreter(piece),
                name=shlex.quote(name),
                first=piece.first.rank,
            )
        )
    script.append(_SLURM_END.format(first_group=group(0), interpreter=first, name=shlex.quote(name)))
    return "".join(script)


def _interpreter(piece: NodeBlock) -> str:
    """Return the interpreter; by default the first in the job's environment."""
    return shlex.quote(piece.first.interpreter) if piece.first.declared_interpreter else "python3"


def _requests(piece: NodeBlock) -> list[str]:
    count = len(piece.nodes)
    lines = [f"#SBATCH --nodes={count}", "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive"]
    declared = piece.first.accelerators
    if declared is not None and declared.per_node:
        lines.append(f"#SBATCH --gpus-per-node={declared.per_node}")
    hosts = [node.host.rpartition("@")[2] for node in piece.nodes if node.host is not None]
    if hosts:
        # Slurm allocates machines in the order of their names; ranks follow that.
        lines.append(f"#SBATCH --nodelist={','.join(hosts)}")
    elif any(node.robots for node in piece.nodes):
        lines.append("# The machines of the robots, in rank order; or list them in `hosts` of the file:")
        lines.append("##SBATCH --nodelist=ROBOT_HOSTS")
    return lines


def kuberay(
    name: str,
    file: str,
    nodes: Sequence[NodeTarget],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> str:
    """Return a RayCluster for KubeRay 1.5.1 or newer: each node is a pod with its own rank.

    Args:
        name: of the cluster.
        file: the configuration file as named on the command line.
        nodes: of the file, by rank.
        overrides: the command line's overrides.
        environ: the source of forwarded variables; the driver runs in the head's pod.

    Raises:
        ConfigError: one of those is not set.
    """
    resource = _kubernetes_name(name)
    forwarded = forwarded_values(nodes[0].forwarded, os.environ if environ is None else environ)
    head, *others = nodes
    spec: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        # Pods have ranks, so their number is fixed.
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": _start_params(head),
            "template": _pod(resource, head, forwarded),
        },
        "workerGroupSpecs": [
            {
                "groupName": f"node-{node.rank}",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 1,
                "rayStartParams": _start_params(node),
                "template": _pod(resource, node, {}),
            }
            for node in others
        ],
    }
    manifest = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": resource}, "spec": spec}
    secrets = sorted(filter(is_secret, forwarded))
    return "\n".join([*_kuberay_notes(resource, shlex.join([file, *overrides]), nodes, secrets), *_yaml(manifest), ""])


def _kuberay_notes(resource: str, arguments: str, nodes: Sequence[NodeTarget], secrets: Sequence[str]) -> list[str]:
    shown = _one_line(arguments)
    notes = [
        f"# {shown}",
        f"# as a RayCluster, for KubeRay 1.5.1 or newer: each node is a pod with its rank in {NODE_RANK.name}.",
        "# Put your image in place of `rlinf:latest`: it needs rlinf with its `train` extra, and Ray of `rayVersion`.",
        f"# Then: kubectl apply -f THIS, copy the file into the head's pod, and there: rlinf train {shown}",
    ]
    if secrets:
        literals = " ".join(f"--from-literal={key}=..." for key in secrets)
        notes.append(f"# Secret values are not written here: kubectl create secret generic {resource}-env {literals}")
    if any(node.robots and node.host is None for node in nodes):
        ranks = format_ranks([node.rank for node in nodes if node.robots and node.host is None])
        notes.append(f"# Nodes {ranks} have robots: `kubectl label node NAME rlinf.io/rank=RANK` marks their machines.")
    return notes


def _start_params(node: NodeTarget) -> dict[str, str]:
    params = {"disable-usage-stats": "true"}
    if node.accelerators is not None:
        # rlinf does its own placement; Ray's resource counts would only interfere without a device plugin.
        params["num-gpus"] = str(node.accelerators.per_node)
    return params


def _pod(resource: str, node: NodeTarget, forwarded: Mapping[str, str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "ray-head" if node.is_head else "ray-worker",
        "image": "rlinf:latest",
        "env": [_variable(resource, key, value) for key, value in _environment(node, forwarded).items()],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    declared = node.accelerators
    if declared is not None and declared.per_node:
        vendor = accelerator_of_model(declared.model).name
        container["resources"] = {"limits": {_DEVICE_PLUGINS.get(vendor, "nvidia.com/gpu"): str(declared.per_node)}}
    pod: dict[str, Any] = {
        "containers": [container],
        # A container's /dev/shm has 64 MiB by default; messages between workers of a pod go through it.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    if node.host is not None:
        pod["nodeSelector"] = {"kubernetes.io/hostname": node.host.rpartition("@")[2]}
    elif node.robots:
        pod["nodeSelector"] = {"rlinf.io/rank": str(node.rank)}
    if node.robots:
        # A robot's controller is on the machine's network, not the cluster's.
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {"spec": pod}


def _environment(node: NodeTarget, forwarded: Mapping[str, str]) -> dict[str, str]:
    env = {**forwarded, **node.env}
    if node.is_head:
        # Commands in the head's pod, such as `rlinf train`, find the cluster by it.
        env[ADDRESS.name] = f"127.0.0.1:{_KUBERAY_GCS_PORT}"
    if node.declared_interpreter:
        # KubeRay runs `ray start` from PATH.
        folder = str(PurePosixPath(node.interpreter).parent)
        env["PATH"] = f"{folder}:{env.get('PATH', _IMAGE_PATH)}"
    return env


def _variable(resource: str, key: str, value: str) -> dict[str, Any]:
    if is_secret(key):
        return {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{resource}-env", "key": key}}}
    # Kubernetes replaces $(NAME) in a value; $$ stands for one $.
    return {"name": key, "value": value.replace("$(", "$$(")}


def _kubernetes_name(name: str) -> str:
    """Return a resource name: lower case, and short enough for pod names of 63 characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")[:40].rstrip("-") or "rlinf"


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Return plain data as YAML. Every text is quoted as in JSON, so that it cannot be taken for another type."""
    lines: list[str] = []
    if isinstance(value, Mapping):
        items: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        for key, item in items.items():
            lines += _entry(f"{indent}{_key(key)}:", item, f"{indent}  ")
    else:
        for item in value:
            first, *rest = _yaml(item, f"{indent}  ")
            lines += [f"{indent}- {first.lstrip()}", *rest]
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", key) else json.dumps(key)


def _entry(start: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping | list) and value:
        return [start, *_yaml(value, indent)]
    return [f"{start} {json.dumps(value)}"]
