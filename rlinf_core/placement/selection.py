"""The units of the node groups that a component selects, numbered consecutively in the order listed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rlinf_core.config.ranks import RankMapPart, nodes_text
from rlinf_core.errors import PlacementError
from rlinf_core.suggest import quoted
from rlinf_core.topology import ClusterTopology, NodeGroupInfo, Unit, UnitKind, UnitNumbers


class PlacementProblem(NamedTuple):
    """A mistake, with its diagnostic code.

    Attributes:
        message: the mistake, with the component or strategy, and the existing alternatives.
        part: the wrong part of the rank map, or None for the whole map.
        label: the index of the wrong selected label, or None.
    """

    code: str
    message: str
    help: str | None = None
    part: RankMapPart | None = None
    label: int | None = None

    def error(self, where: str) -> PlacementError:
        """Return the mistake as an error at `where`, with the wrong part appended."""
        if self.part is not None and str(self.part) not in where.split("`"):
            where = f"{where}, part `{self.part}`"
        return PlacementError(self.message, where=where, help=self.help)


class Location(NamedTuple):
    """The location of a resource: its node, its index among the node's units of its kind, and the selecting group."""

    node: int
    local_rank: int
    label: str


class UnitRange(NamedTuple):
    """The cluster-wide units `units`, whose resource ranks start at `first`, selected by group `label`."""

    first: int
    units: range
    label: str


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Groups, in the order listed, that count the same kind of unit; `segments` are the resource ranks in order."""

    topology: ClusterTopology
    groups: tuple[NodeGroupInfo, ...]
    unit: Unit
    segments: tuple[UnitRange, ...]
    count: int
    _firsts: list[int]
    _numbers: UnitNumbers

    @property
    def ignores_hardware(self) -> bool:
        return all(group.ignores_hardware for group in self.groups)

    @property
    def lacks_accelerators(self) -> bool:
        """Whether nodes are counted because the probed nodes have no accelerators and none were declared."""
        plain = (group for group in self.groups if not group.ignores_hardware and not group.declared)
        return self.topology.probed and self.unit.kind is UnitKind.NODE and any(plain)

    @property
    def name(self) -> str:
        """The labels of the groups in backticks, joined by commas."""
        return quoted(group.label for group in self.groups)

    @property
    def exist(self) -> str:
        """The existing resource ranks, as a phrase to follow "has"."""
        return f"resources 0-{self.count - 1}" if self.count > 1 else "only resource 0"

    def locate(self, rank: int) -> Location:
        """Return the location of resource `rank`, which must be below `count`."""
        segment = self.segments[bisect_right(self._firsts, rank) - 1]
        unit = segment.units.start + rank - segment.first
        node = self._numbers.node_of(unit)
        return Location(node, unit - self._numbers.on_node(node).start, segment.label)

    def units(self, ranks: range) -> Iterator[range]:
        """Return the cluster-wide units of consecutive resource ranks."""
        return (units for _, units in self._labelled(ranks))

    def _labelled(self, ranks: range) -> Iterator[tuple[str, range]]:
        for first, units, label in self.segments:
            start, stop = max(ranks.start - first, 0), min(ranks.stop - first, len(units))
            if start < stop:
                yield label, units[start:stop]

    def nodes(self, ranks: range) -> Iterator[tuple[str, range]]:
        """Return the nodes of consecutive resource ranks, as ranges with the label that selects them."""
        return ((label, self._numbers.nodes_of(units)) for label, units in self._labelled(ranks))

    def describe(self) -> str:
        """Return the units in words, as in `8 nodes x 8 accelerators` or `2 Franka units on nodes 16-17`."""
        counts = self._counts()
        with_units = {node: count for node, count in counts.items() if count}
        if self.unit.kind is UnitKind.NODE:
            return self.unit.counted(self.count)
        nodes = f"{len(with_units)} node{'s' * (len(with_units) != 1)}"
        if len(set(with_units.values())) == 1 and self.unit.kind is UnitKind.ACCELERATOR:
            return f"{nodes} x {self.unit.counted(next(iter(with_units.values())))}"
        if self.unit.kind is UnitKind.ROBOT and with_units:
            return f"{self.unit.counted(self.count)} on {nodes_text(with_units)}"
        return f"{self.unit.counted(self.count)} on {nodes}"

    def _counts(self) -> dict[int, int]:
        return {node: len(self._numbers.on_node(node)) for group in self.groups for node in group.node_ranks}


def selection_of(topology: ClusterTopology, groups: tuple[NodeGroupInfo, ...]) -> Selection:
    """Return the selection of groups that count the same known kind of unit."""
    unit = groups[0].unit
    if unit is None:
        raise ValueError(f"the units of group {groups[0].label} are unknown")
    segments: list[UnitRange] = []
    count = 0
    for group in groups:
        for units in group.segments:
            segments.append(UnitRange(count, units, group.label))
            count += len(units)
    firsts = [segment.first for segment in segments]
    return Selection(topology, groups, unit, tuple(segments), count, firsts, topology.numbers(unit))
