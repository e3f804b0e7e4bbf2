"""Facts about a node, collected on the node itself."""

from __future__ import annotations

import platform
import socket
import sys
from dataclasses import dataclass

from rlinf_core import env_vars
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.collective.connections.listener import listen_tcp
from rlinf_core.hardware.accelerators.vendors import find_accelerators
from rlinf_core.version import __version__

_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about one node.

    Attributes:
        declared_rank: the `RLINF_NODE_RANK` of the environment that Ray was started in, or None.
        python: the path of the interpreter that Ray runs there.
        versions: pairs such as `("python", "3.11.7")`.
        accelerator_type: the vendor as in `NVIDIA`, or None without accelerators.
        accelerator_model: the first device's model, or None.
        accelerator_ids: the devices' names in the visibility variable; empty if they are `0`, `1`, ...
    """

    declared_rank: int | None
    hostname: str
    python: str
    versions: tuple[tuple[str, str], ...]
    num_accelerators: int
    accelerator_type: str | None
    accelerator_model: str | None
    accelerator_ids: tuple[str, ...]


def probe() -> NodeFacts:
    """Return the facts of this machine."""
    ray = ray_api()
    accelerators = find_accelerators()
    devices = accelerators.devices
    ids = tuple(device.visible_id for device in devices)
    return NodeFacts(
        declared_rank=env_vars.NODE_RANK.get(),
        hostname=socket.gethostname(),
        python=sys.executable,
        versions=(("python", platform.python_version()), ("ray", ray.__version__), ("rlinf", __version__)),
        num_accelerators=len(devices),
        accelerator_type=accelerators.accelerator.name if devices else None,
        accelerator_model=devices[0].model if devices else None,
        accelerator_ids=() if ids == tuple(map(str, range(len(ids)))) else ids,
    )


def free_port() -> int:
    """Return a TCP port of this machine that is free now, within `RLINF_PORTS` if set."""
    with listen_tcp("", _BUFFER_BYTES, env_vars.PORTS.get()) as listener:
        return int(listener.getsockname()[1])
