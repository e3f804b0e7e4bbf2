"""A RayCluster or RayJob for KubeRay: each node of the file is a pod with its own rank."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.schedulers.pods import check_wishes, pod_of, value_of
from rlinf_cli.cluster.schedulers.text import one_line, yaml
from rlinf_cli.cluster.schedulers.wishes import Wish
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.secrets import is_secret
from rlinf_core.env_vars import NODE_RANK
from rlinf_core.errors import ConfigError
from rlinf_core.placement.environment import forwarded_values

# The version that the extra `train` requires.
RAY_VERSION: Final = "2.60.0"
# Where a RayJob's file is in the head's pod, and its key in the ConfigMap.
_FILE_FOLDER: Final = "/etc/rlinf"
_FILE_KEY: Final = "job.yaml"


def kuberay(
    name: str,
    file: str,
    nodes: Sequence[NodeTarget],
    overrides: Sequence[str] = (),
    wishes: Iterable[Wish] = (),
    environ: Mapping[str, str] | None = None,
    text: str | None = None,
    log_path: str | None = None,
) -> str:
    """Return a RayCluster for KubeRay 1.5.1 or newer, or a RayJob: each node is a pod with its own rank.

    Args:
        name: the name of the cluster.
        file: the configuration file as named on the command line.
        nodes: the nodes of the file, by rank.
        overrides: the command line's overrides.
        wishes: keys of `pods.WISHES`.
        environ: the source of forwarded variables; the driver runs in the head's pod.
        text: the text of the file, which a RayJob carries with it; None if the image has the file.
        log_path: `runner.logger.log_path` of the file; None if it has none.

    Raises:
        ConfigError: a forwarded variable is not set, a wish is not valid, or no volume keeps the results of a RayJob.
    """
    wishes = list(wishes)
    check_wishes(wishes)
    is_job = any(wish.key == "job" for wish in wishes)
    mounts = [value_of(wish).partition(":")[2] for wish in wishes if wish.key == "volume" and wish.covers(nodes[0])]
    overrides = [*overrides, *_results(mounts, log_path, is_job)]
    resource = _kubernetes_name(name)
    forwarded = forwarded_values(nodes[0].forwarded, os.environ if environ is None else environ)
    spec = _cluster(resource, nodes, forwarded, wishes)
    shown = one_line(shlex.join([file, *overrides]))
    if is_job:
        kind, then = (
            "RayJob",
            "kubectl apply -f THIS. KubeRay submits to Ray's dashboard: the image needs `ray[default]`.",
        )
        manifests = _job(resource, spec, file, overrides, text)
    else:
        kind = "RayCluster"
        then = f"kubectl apply -f THIS, copy the file into the head's pod, and there: rlinf train {shown}"
        manifests = [_manifest(kind, resource, spec)]
    lines = [
        f"# {shown}",
        f"# as a {kind}, for KubeRay 1.5.1 or newer: each node is a pod with its rank in {NODE_RANK.name}.",
    ]
    if not any(wish.key == "image" and wish.group is None for wish in wishes):
        lines.append(
            "# Put your image in place of `rlinf:latest`: it needs rlinf with its extra `train`, and this Ray."
        )
    if not mounts:
        lines.append(
            "# Runs end with the head's pod: `--with volume=CLAIM:/PATH` mounts a volume, and they are written there."
        )
    lines += [f"# Then: {then}", *_notes(resource, nodes, sorted(filter(is_secret, forwarded)))]
    for index, manifest in enumerate(manifests):
        lines += [*(["---"] if index else []), *yaml(manifest)]
    return "\n".join([*lines, ""])


def _results(mounts: Sequence[str], log_path: str | None, is_job: bool) -> list[str]:
    """Return the override by which runs are written to a volume of the head, where the driver runs.

    Raises:
        ConfigError: it is a job, whose pods end with it, and no volume would keep its results.
    """
    key = "runner.logger.log_path"
    folder = PurePosixPath(log_path or ".")
    if any(folder.is_relative_to(mount) for mount in mounts):
        return []
    if len(mounts) == 1 and not folder.is_absolute():
        return [f"{key}={mounts[0]}"]
    if not is_job:
        return []
    if not mounts:
        raise ConfigError(
            "the results of the job would be deleted with its pods: no volume is mounted in the head's pod",
            help="add `--with volume=CLAIM:/runs`, where CLAIM is a persistent volume claim",
        )
    listed = ", ".join(f"`{mount}`" for mount in mounts)
    raise ConfigError(
        f"the results of the job would be deleted with its pods: `{key}` (`{folder}`) is in no volume",
        why=f"the volumes of the head's pod are mounted at {listed}",
        help=f"add `{key}={mounts[0]}`",
    )


def _manifest(kind: str, resource: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": resource}, "spec": spec}


def _cluster(
    resource: str, nodes: Sequence[NodeTarget], forwarded: Mapping[str, str], wishes: Sequence[Wish]
) -> dict[str, Any]:
    head, *others = nodes
    return {
        "rayVersion": RAY_VERSION,
        # Pods have ranks, so their number is fixed.
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": _start_params(head),
            "template": pod_of(resource, head, forwarded, wishes),
        },
        "workerGroupSpecs": [
            {
                "groupName": f"node-{node.rank}",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 1,
                "rayStartParams": _start_params(node),
                "template": pod_of(resource, node, {}, wishes),
            }
            for node in others
        ],
    }


def _job(
    resource: str, spec: dict[str, Any], file: str, overrides: Sequence[str], text: str | None
) -> list[dict[str, Any]]:
    """Return the manifests of a job: its file, if the image does not have it, and the RayJob."""
    manifests: list[dict[str, Any]] = []
    if text is not None:
        source, file = f"{resource}-file", f"{_FILE_FOLDER}/{_FILE_KEY}"
        manifests.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": source}, "data": {_FILE_KEY: text}}
        )
        pod = spec["headGroupSpec"]["template"]["spec"]
        pod["volumes"].append({"name": "file", "configMap": {"name": source}})
        pod["containers"][0]["volumeMounts"].append({"name": "file", "mountPath": _FILE_FOLDER})
    job = {
        "entrypoint": shlex.join(["rlinf", "train", file, *overrides]),
        # The pods are there for this job alone.
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": spec,
    }
    return [*manifests, _manifest("RayJob", resource, job)]


def _notes(resource: str, nodes: Sequence[NodeTarget], secrets: Sequence[str]) -> list[str]:
    notes: list[str] = []
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


def _kubernetes_name(name: str) -> str:
    """Return a resource name: lower case, and short enough for pod names of 63 characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")[:40].rstrip("-") or "rlinf"
