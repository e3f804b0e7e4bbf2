"""A RayCluster for KubeRay: each node of the file is a pod with its own rank."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from rlinf_cli.bootstrap.inventory import NodeTarget
from rlinf_cli.bootstrap.templates.text import one_line, yaml
from rlinf_cli.bootstrap.templates.wishes import Wish, unknown
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


def kuberay(
    name: str,
    file: str,
    nodes: Sequence[NodeTarget],
    overrides: Sequence[str] = (),
    wishes: Iterable[Wish] = (),
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
    for wish in wishes:
        raise unknown(wish, (), "kuberay")
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
    return "\n".join([*_kuberay_notes(resource, shlex.join([file, *overrides]), nodes, secrets), *yaml(manifest), ""])


def _kuberay_notes(resource: str, arguments: str, nodes: Sequence[NodeTarget], secrets: Sequence[str]) -> list[str]:
    shown = one_line(arguments)
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
