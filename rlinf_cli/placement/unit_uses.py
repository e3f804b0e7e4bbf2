"""The processes on each unit of hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology, NodeInfo


@dataclass(frozen=True, slots=True)
class UnitUse:
    """A unit of hardware, or a node as a whole, with the processes on it.

    Attributes:
        node_rank: its node.
        hardware_type: the hardware type, as in `Placement.hardware_type`.
        local_hardware_rank: its index among the node's units of that type.
        users: (component, rank) of every process on it.
    """

    node_rank: int
    hardware_type: str
    local_hardware_rank: int
    users: tuple[tuple[str, int], ...]

    @property
    def components(self) -> tuple[str, ...]:
        """The components that use it, each once."""
        return tuple(dict.fromkeys(component for component, _ in self.users))

    @property
    def idle(self) -> bool:
        return not self.users

    @property
    def shared(self) -> bool:
        """Whether several components use it."""
        return len(self.components) > 1


def unit_uses(topology: ClusterTopology, placements: Mapping[str, Sequence[Placement]]) -> list[UnitUse]:
    """Return every known accelerator and robot, node by node, used or not.

    A node as a whole is listed if it has neither, or if processes were placed on nodes rather than on hardware.
    """
    users: dict[tuple[int, str, int], list[tuple[str, int]]] = {}
    for component, processes in placements.items():
        for process in processes:
            node, kind = process.cluster_node_rank, process.hardware_type
            for unit in process.local_hardware_ranks or (0,):
                users.setdefault((node, kind, unit), []).append((component, process.rank))
    uses: list[UnitUse] = []
    for node in topology.nodes:
        for kind, index in (*_units(node), ("node", 0)):
            users_of_unit = users.get((node.rank, kind, index), [])
            bare = node.num_accelerators == 0 and not node.robots
            if kind != "node" or users_of_unit or bare:
                uses.append(UnitUse(node.rank, kind, index, tuple(users_of_unit)))
    return uses


def _units(node: NodeInfo) -> Iterable[tuple[str, int]]:
    kind = node.accelerator_type or "accelerator"
    yield from ((kind, index) for index in range(node.num_accelerators or 0))
    counts: dict[str, int] = {}
    for robot in node.robots:
        index = counts.get(robot.type, 0)
        counts[robot.type] = index + 1
        yield robot.type, index
