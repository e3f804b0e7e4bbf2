"""A pod of KubeRay for a node of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.schedulers.wishes import Wish, unknown
from rlinf_core.config.secrets import is_secret
from rlinf_core.env_vars import ADDRESS
from rlinf_core.errors import ConfigError
from rlinf_core.hardware.accelerators.vendors import accelerator_of_model

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

_IMAGE: Final = "rlinf:latest"
# Of Kubernetes objects; of amounts, such as `500m` or `64Gi`.
_NAME: Final = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_QUANTITY: Final = r"[0-9]+(\.[0-9]+)?([mkMGTPE]|[KMGTPE]i)?"
_LABEL: Final = r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
# Keys of `--with`: the form of their values and an example; None without a value.
WISHES: Final[Mapping[str, tuple[str, str] | None]] = {
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


def check_wishes(wishes: Sequence[Wish]) -> None:
    """Check the keys and values of `--with`.

    Raises:
        ConfigError: there is no such key, or its value is missing, of another form, or not to be given.
    """
    for wish in wishes:
        if wish.key not in WISHES:
            raise unknown(wish, tuple(WISHES), "kuberay")
        form = WISHES[wish.key]
        if form is None:
            if wish.value is not None or wish.group is not None:
                raise ConfigError(f"`--with {wish.key}` is for all nodes, and has no value")
        elif wish.value is None or not re.fullmatch(form[0], wish.value):
            shown = f"`{wish.value}` is not a value of" if wish.value is not None else "there is no value for"
            raise ConfigError(f"{shown} `--with {wish.key}`", help=f"write it as in `--with {wish.key}={form[1]}`")


def value_of(wish: Wish) -> str:
    """Return the value of a checked wish that has one."""
    return wish.value or ""


def _volume(claim: str) -> str:
    """Return the name of a claim's volume, which may have no dots."""
    return f"claim-{claim}".replace(".", "-")


def _toleration(text: str) -> dict[str, str]:
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    toleration = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return {**toleration, "effect": effect} if effect else toleration


def pod_of(resource: str, node: NodeTarget, forwarded: Mapping[str, str], wishes: Sequence[Wish]) -> dict[str, Any]:
    """Return the template of a node's pod.

    Args:
        resource: the name of the manifest.
        node: the node.
        forwarded: variables of the head's container.
        wishes: checked ones.
    """
    asked = [wish for wish in wishes if wish.covers(node)]
    volumes = [value_of(wish).split(":", 1) for wish in asked if wish.key == "volume"]
    container: dict[str, Any] = {
        "name": "ray-head" if node.is_head else "ray-worker",
        "image": next((value_of(wish) for wish in reversed(asked) if wish.key == "image"), _IMAGE),
        "env": [_variable(resource, key, value) for key, value in _environment(node, forwarded).items()],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": _volume(claim), "mountPath": path} for claim, path in volumes),
        ],
    }
    secrets = [value_of(wish) for wish in asked if wish.key == "secret"]
    if secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in secrets]
    requests = {wish.key: value_of(wish) for wish in asked if wish.key in ("cpu", "memory")}
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
    tolerations = [_toleration(value_of(wish)) for wish in asked if wish.key == "toleration"]
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
        # Commands in the head's pod, such as `rlinf train`, find the cluster by it.
        env[ADDRESS.name] = f"127.0.0.1:{_KUBERAY_GCS_PORT}"
    if node.declared_interpreter:
        # KubeRay runs `ray start` from PATH.
        folder = str(PurePosixPath(node.interpreter).parent)
        env["PATH"] = f"{folder}:{env.get('PATH', _IMAGE_PATH)}"
    return env


def _variable(resource: str, key: str, value: str) -> dict[str, Any]:
    if is_secret(key, value):
        return {"name": key, "valueFrom": {"secretKeyRef": {"name": f"{resource}-env", "key": key}}}
    # Kubernetes replaces $(NAME) in a value; $$ stands for one $.
    return {"name": key, "value": value.replace("$(", "$$(")}
