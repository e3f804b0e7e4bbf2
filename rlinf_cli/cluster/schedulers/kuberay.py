"""A RayCluster or RayJob for KubeRay: each node of the file is a pod with its own rank."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import PurePosixPath
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.schedulers import SchedulerOption, one_line
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.secrets import is_secret
from rlinf_core.env_vars import ADDRESS, NODE_RANK
from rlinf_core.errors import ConfigError
from rlinf_core.hardware.accelerators import accelerator_of_model
from rlinf_core.node.environment import forwarded_values
from rlinf_core.suggest import did_you_mean, quoted

# The version that the extra `train` requires.
RAY_VERSION: Final = "2.60.0"
# The folder of a RayJob's file in the head's pod, and its key in the ConfigMap.
_FILE_FOLDER: Final = "/etc/rlinf"
_FILE_KEY: Final = "job.yaml"
# Resource names of the vendors' device plugins.
_DEVICE_PLUGINS: Final = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Ascend": "huawei.com/Ascend910",
    "Intel": "gpu.intel.com/xe",
    "MUSA": "mthreads.com/gpu",
}
# KubeRay's default GCS port of the head.
_KUBERAY_GCS_PORT: Final = 6379
_IMAGE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_IMAGE: Final = "rlinf:latest"
# Names of Kubernetes objects; amounts, such as `500m` or `64Gi`; keys of labels.
_NAME: Final = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_QUANTITY: Final = r"[0-9]+(\.[0-9]+)?([mkMGTPE]|[KMGTPE]i)?"
_LABEL: Final = r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
# Keys of `--with`: the form of their values and an example; None without a value.
_OPTIONS: Final[Mapping[str, tuple[str, str] | None]] = {
    "image": (r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*", "registry.lab/rlinf:1"),
    "volume": (rf"{_NAME}:/[^:]*", "runs:/runs"),
    "cpu": (_QUANTITY, "16"),
    "memory": (_QUANTITY, "64Gi"),
    "toleration": (
        rf"{_LABEL}(=[A-Za-z0-9_.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
        "pool=robots:NoSchedule",
    ),
    "secret": (_NAME, "wandb"),
    "job": None,
}


def kuberay(
    name: str,
    file: str,
    nodes: Sequence[NodeTarget],
    overrides: Sequence[str] = (),
    options: Iterable[SchedulerOption] = (),
    environ: Mapping[str, str] | None = None,
    text: str | None = None,
    log_path: str | None = None,
) -> str:
    """Return a RayCluster for KubeRay 1.5.1 or newer, or a RayJob: each node is a pod with its own rank.

    Args:
        name: the name of the cluster.
        file: the configuration file as named on the command line.
        nodes: the nodes of the file.
        overrides: the overrides for `rlinf train`.
        options: the options of `--with`.
        environ: the source of forwarded variables; the driver runs in the head's pod.
        text: the text of the file, which a RayJob includes; None if the image has the file.
        log_path: `runner.logger.log_path` of the file, or None.

    Raises:
        ConfigError: a forwarded variable is not set, an option is invalid, or no volume keeps a RayJob's results.
    """
    options = list(options)
    _check(options)
    is_job = any(option.key == "job" for option in options)
    mounts = [volume.partition(":")[2] for volume in _values(options, nodes[0], "volume")]
    overrides = [*overrides, *_results(mounts, log_path, is_job)]
    # Lower case, with a letter first, and short enough for pod names of 63 characters.
    resource = re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")
    resource = (resource if resource[:1].isalpha() else f"rlinf-{resource}")[:40].rstrip("-")
    forwarded = forwarded_values(nodes[0].forwarded, os.environ if environ is None else environ)
    spec = _cluster(resource, nodes, forwarded, options)
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
    if not any(option.key == "image" and option.group is None for option in options):
        lines.append(
            "# Put your image in place of `rlinf:latest`: it needs rlinf with its extra `train`, and this Ray."
        )
    if not mounts:
        lines.append(
            "# Runs end with the head's pod: `--with volume=CLAIM:/PATH` mounts a volume, and they are written there."
        )
    lines += [f"# Then: {then}", *_notes(resource, nodes, sorted(filter(is_secret, forwarded)))]
    return "\n".join([*lines, "---\n".join(map(_yaml, manifests))])


def _check(options: Sequence[SchedulerOption]) -> None:
    """Check the keys and values of `--with`.

    Raises:
        ConfigError: a key is unknown, or its value is missing, malformed or not allowed.
    """
    for option in options:
        if option.key not in _OPTIONS:
            help = did_you_mean(option.key, _OPTIONS) or f"it has {quoted(_OPTIONS)}"
            raise ConfigError(f"`--print kuberay` has no `{option.key}`", help=help)
        form = _OPTIONS[option.key]
        if form is None:
            if option.value is not None or option.group is not None:
                raise ConfigError(f"`--with {option.key}` is for all nodes, and has no value")
        elif option.value is None or not re.fullmatch(form[0], option.value):
            shown = f"`{option.value}` is not a value of" if option.value is not None else "there is no value for"
            help = f"write it as in `--with {option.key}={form[1]}`"
            raise ConfigError(f"{shown} `--with {option.key}`", help=help)


def _values(options: Sequence[SchedulerOption], node: NodeTarget, key: str) -> list[str]:
    """Return the values of a key that apply to a node."""
    return [option.value or "" for option in options if option.key == key and option.covers(node)]


def _results(mounts: Sequence[str], log_path: str | None, is_job: bool) -> list[str]:
    """Return the override that writes runs to a volume of the head's pod, where the driver runs.

    Raises:
        ConfigError: no volume would keep the results of a RayJob, whose pods end with it.
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
    resource: str, nodes: Sequence[NodeTarget], forwarded: Mapping[str, str], options: Sequence[SchedulerOption]
) -> dict[str, Any]:
    head, *others = nodes
    return {
        "rayVersion": RAY_VERSION,
        # Each pod has a rank, so their number is fixed.
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": _start_params(head),
            "template": _pod(resource, head, forwarded, options),
        },
        "workerGroupSpecs": [
            {
                "groupName": f"node-{node.rank}",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 1,
                "rayStartParams": _start_params(node),
                "template": _pod(resource, node, {}, options),
            }
            for node in others
        ],
    }


def _job(
    resource: str, spec: dict[str, Any], file: str, overrides: Sequence[str], text: str | None
) -> list[dict[str, Any]]:
    """Return the manifests of a job: a ConfigMap with `text`, if given, and the RayJob."""
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
        # The submitter's container has it among its arguments.
        "entrypoint": _literal(shlex.join(["rlinf", "train", file, *overrides])),
        # The pods serve only this job.
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


def _volume(claim: str) -> str:
    """Return the name of a claim's volume, which must not contain dots."""
    return f"claim-{claim}".replace(".", "-")


def _toleration(text: str) -> dict[str, str]:
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    toleration = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return {**toleration, "effect": effect} if effect else toleration


def _pod(
    resource: str, node: NodeTarget, forwarded: Mapping[str, str], options: Sequence[SchedulerOption]
) -> dict[str, Any]:
    """Return the template of a node's pod."""
    volumes = [value.split(":", 1) for value in _values(options, node, "volume")]
    container: dict[str, Any] = {
        "name": "ray-head" if node.is_head else "ray-worker",
        "image": [_IMAGE, *_values(options, node, "image")][-1],
        "env": [_variable(resource, key, value) for key, value in _environment(node, forwarded).items()],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": _volume(claim), "mountPath": path} for claim, path in volumes),
        ],
    }
    secrets = _values(options, node, "secret")
    if secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in secrets]
    requests = {key: value for key in ("cpu", "memory") for value in _values(options, node, key)}
    resources: dict[str, Any] = {"requests": requests} if requests else {}
    declared = node.accelerators
    if declared is not None and declared.per_node:
        vendor = accelerator_of_model(declared.model).name
        resources["limits"] = {_DEVICE_PLUGINS.get(vendor, "nvidia.com/gpu"): str(declared.per_node)}
    if resources:
        container["resources"] = resources
    pod: dict[str, Any] = {
        "containers": [container],
        # A container's /dev/shm has 64 MiB by default; messages between workers of a pod go through it.
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *(
                {"name": _volume(claim), "persistentVolumeClaim": {"claimName": claim}}
                for claim in dict.fromkeys(claim for claim, _ in volumes)
            ),
        ],
    }
    tolerations = list(map(_toleration, _values(options, node, "toleration")))
    if tolerations:
        pod["tolerations"] = tolerations
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
        # Commands in the head's pod, such as `rlinf train`, find the cluster by this address.
        env[ADDRESS.name] = f"127.0.0.1:{_KUBERAY_GCS_PORT}"
    if node.declared_interpreter:
        # KubeRay runs `ray start` from PATH.
        folder = str(PurePosixPath(node.interpreter).parent)
        env["PATH"] = f"{folder}:{env.get('PATH', _IMAGE_PATH)}"
    return env


def _variable(resource: str, key: str, value: str) -> dict[str, Any]:
    if is_secret(key, value):
        return {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{resource}-env", "key": key}}}
    return {"name": key, "value": _literal(value)}


def _literal(text: str) -> str:
    """Return a variable's value or an argument as Kubernetes reads it, which replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$")


def _yaml(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as YAML, with every text quoted so that no reader interprets it as another type."""
    yaml: Any = YAML()
    stream = StringIO()
    yaml.width = 2**20
    yaml.dump(_quoted(manifest), stream)
    return stream.getvalue()


def _quoted(value: Any) -> Any:
    if isinstance(value, str):
        return DoubleQuotedScalarString(value)
    if isinstance(value, Mapping):
        return {key: _quoted(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return [_quoted(item) for item in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]
