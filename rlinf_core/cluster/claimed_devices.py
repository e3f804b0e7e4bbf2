"""The devices that claims are for: the accelerators and robots of processes, by names that all jobs give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from rlinf_core.hardware.robots.unit import variable_of
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology, NodeInfo

Devices = Mapping[str, str]
"""Devices of a node, as in `NVIDIA:GPU-5d5b`, each with its words for people, as in `accelerator 0`."""


def devices_of(topology: ClusterTopology, placements: Iterable[Placement]) -> dict[int, dict[str, str]]:
    """Return the accelerators and robots of processes, by node."""
    devices: dict[int, dict[str, str]] = {}
    for placement in placements:
        node = topology.nodes[placement.cluster_node_rank]
        if named := dict(_devices(node, placement)):
            devices.setdefault(node.rank, {}).update(named)
    return devices


def labels_of(node: NodeInfo) -> dict[str, str]:
    """Return what people call a node's accelerators, as in `NVIDIA:0`, by the names that these are claimed by."""
    return {
        f"{node.accelerator_type}:{name}": f"{node.accelerator_type}:{_visible_id(node, unit)}"
        for unit in range(node.num_accelerators or 0)
        for name in _identities(node, unit)
    }


def _identities(node: NodeInfo, unit: int) -> Sequence[str]:
    """Return the names of an accelerator among all of its machine: two jobs may see it under different numbers."""
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
                # What a variable of the node stands for is not known here: the robot's own claim guards it.
                if variable_of(single) is None:
                    # A camera is the same whatever robot has it.
                    kind = "camera" if field.endswith("camera_serials") else placement.hardware_type
                    yield f"{kind}:{single}", f"{kind} {single}"
