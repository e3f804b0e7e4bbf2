"""The holder of claims on a node without the driver: an actor, which may outlast an attempt of a run.

Claims are on accelerators and robots, under names that are the same for every job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from rlinf_core.hardware.robots.unit import variable_of
from rlinf_core.node.device_claims import DeviceHolder
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology, NodeInfo

Devices = Mapping[str, str]
"""The devices of a node, for example `NVIDIA:GPU-5d5b`, each with its readable name, for example `accelerator 0`."""


def devices_of(topology: ClusterTopology, placements: Iterable[Placement]) -> dict[int, dict[str, str]]:
    """Return the accelerators and robots of processes, by node."""
    devices: dict[int, dict[str, str]] = {}
    for placement in placements:
        node = topology.nodes[placement.cluster_node_rank]
        if named := dict(_devices(node, placement)):
            devices.setdefault(node.rank, {}).update(named)
    return devices


def labels_of(node: NodeInfo) -> dict[str, str]:
    """Return the readable names of a node's accelerators, for example `NVIDIA:0`, by their names in claims."""
    return {
        f"{node.accelerator_type}:{name}": f"{node.accelerator_type}:{_visible_id(node, unit)}"
        for unit in range(node.num_accelerators or 0)
        for name in _identities(node, unit)
    }


def _identities(node: NodeInfo, unit: int) -> Sequence[str]:
    """Return the machine-wide names of an accelerator: two jobs may see it under different numbers."""
    return node.accelerator_identities[unit] if node.accelerator_identities else (_visible_id(node, unit),)


def _visible_id(node: NodeInfo, unit: int) -> str:
    return node.accelerator_ids[unit] if node.accelerator_ids else str(unit)


def _devices(node: NodeInfo, placement: Placement) -> Iterable[tuple[str, str]]:
    if placement.local_accelerator_rank is not None:
        for unit in placement.local_hardware_ranks:
            for name in _identities(node, unit):
                yield f"{placement.hardware_type}:{name}", f"accelerator {unit}"
        return
    robots = [robot for robot in node.robots if robot.type == placement.hardware_type]
    for unit in placement.local_hardware_ranks if robots else ():
        config = robots[unit].config
        for field in type(config).exclusive:
            value: Any = getattr(config, field)
            several = isinstance(value, tuple | list)
            for single in map(str, cast("Sequence[object]", value) if several else [value] if value else ()):
                # The value of a variable of the node is not known here; the robot's own claim guards that device.
                if variable_of(single) is None:
                    # A camera has the same name whichever robot declares it.
                    kind = "camera" if field.endswith("camera_serials") else placement.hardware_type
                    yield f"{kind}:{single}", f"{kind} {single}"


class ClaimsOn(Protocol):
    """The interface of a cluster to claims."""

    @property
    def topology(self) -> ClusterTopology: ...
    @property
    def own_rank(self) -> int | None: ...
    def allocate(self, actor_class: type, *, node_rank: int, outlives: bool = False) -> Any: ...
    def announce_wait(self, what: str, *, again: bool = False, instead: str = "") -> None: ...


class NodeHolder(DeviceHolder):
    """The holder of claims on a node without the driver: an actor, which ends with the job unless it keeps claims."""

    def pid(self) -> int:
        """Return the pid of this process."""
        return os.getpid()

    def keep(
        self, names: Mapping[str, str], pid: int, labels: Mapping[str, str], about: Mapping[str, Any], seconds: float
    ) -> tuple[int, list[str]]:
        """Hold claims until the next attempt adopts them, at most `seconds`, and then end this process.

        Returns:
            The pid of this process, and the devices whose claims it has.
        """
        self.tell(about)
        devices = self.adopt(names, pid, labels)
        self.when_empty(_end_process)
        end = threading.Timer(seconds, self.drop)
        end.daemon = True
        end.start()
        return os.getpid(), devices


def _end_process() -> None:
    os._exit(0)


class LeftClaims(NamedTuple):
    """The claims that an attempt of a run has left on a node for the next attempt.

    Attributes:
        pid: the pid of the process that holds them there.
        names: the names of the claims, by device.
    """

    pid: int
    names: Mapping[str, str]
