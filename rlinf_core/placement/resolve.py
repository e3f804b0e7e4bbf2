"""The resolution of a rank map on a topology: the resources of each process. Mistakes are returned, not raised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rlinf_core.config.ranks import RankMap, RankMapPart, common, format_range, intersect, merge_ranges, nodes_text
from rlinf_core.placement.selection import PlacementProblem, Selection, selection_of
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology, NodeGroupInfo, Unit, UnitKind


@dataclass(frozen=True, slots=True)
class Block:
    """A resolved part of a rank map: one count is a multiple of the other."""

    resources: range
    processes: range

    @property
    def density(self) -> float:
        """The number of processes per resource."""
        return len(self.processes) / len(self.resources)

    def __iter__(self) -> Iterator[range]:
        """Yield the resources of each process, in the order of the processes."""
        start, share = self.resources.start, len(self.resources) // len(self.processes)
        if share:
            for index in range(len(self.processes)):
                yield range(start + index * share, start + (index + 1) * share)
        else:
            sharing = len(self.processes) // len(self.resources)
            for rank in self.resources:
                ranks = range(rank, rank + 1)
                for _ in range(sharing):
                    yield ranks


@dataclass(frozen=True, slots=True)
class Coverage:
    """The units of a component, as ranges of their cluster-wide numbers, so that sharing is cheap to compute."""

    unit: Unit
    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))


class Resolution(NamedTuple):
    """The meaning of a rank map.

    Attributes:
        selection: the units that it counts, or None if unknown or wrongly selected.
        blocks: the valid parts.
        problems: every mistake, in the order of the map; empty if processes can be placed.
        unknown: labels of selected groups with unknown accelerators; the bounds of the map were not checked.
        groups: the selected groups that exist.
        by_number: whether the map names resources by rank, rather than `all`.
    """

    selection: Selection | None
    blocks: tuple[Block, ...] = ()
    problems: tuple[PlacementProblem, ...] = ()
    unknown: tuple[str, ...] = ()
    groups: tuple[NodeGroupInfo, ...] = ()
    by_number: bool = True

    @property
    def world_size(self) -> int:
        return sum(len(block.processes) for block in self.blocks)

    @property
    def lacks_accelerators(self) -> bool:
        """Whether the component is placed by rank on nodes that have no accelerators."""
        return self.selection is not None and self.by_number and self.selection.lacks_accelerators

    def coverage(self) -> Coverage | None:
        """Return the component's units; None if unknown."""
        selection = self.selection
        if selection is None:
            return None
        units = (units for block in self.blocks for units in selection.units(block.resources))
        return Coverage(selection.unit, merge_ranges(units))

    def nodes(self) -> dict[str, tuple[range, ...]]:
        """Return the component's nodes by the label that selects them; all nodes of its groups if units are unknown."""
        if self.selection is None:
            return {group.label: group.node_ranges for group in self.groups}
        by_label: dict[str, list[range]] = {}
        for block in self.blocks:
            for label, nodes in self.selection.nodes(block.resources):
                by_label.setdefault(label, []).append(nodes)
        return {label: merge_ranges(nodes) for label, nodes in by_label.items()}

    def processes(self) -> Iterator[range]:
        """Return the resources of every process, by process rank."""
        for block in self.blocks:
            yield from block


def select(topology: ClusterTopology, labels: Sequence[str], subject: str) -> Resolution:
    """Select groups by label (none means `cluster`), without blocks; `subject` starts the messages, as in "component
    `actor`"."""
    labels = tuple(labels) or (CLUSTER_LABEL,)
    problems = [
        _unknown_group(topology, label, index, subject)
        for index, label in enumerate(labels)
        if label not in topology.groups
    ]
    groups = tuple(topology.groups[label] for label in labels if label in topology.groups)
    problems += _listed_twice(labels, subject)
    if problems:
        return Resolution(None, problems=tuple(problems), groups=groups)
    unknown = tuple(group.label for group in groups if group.unit is None)
    problems = _mixed_units(groups, subject) or _overlaps(topology, groups, subject)
    if problems or unknown:
        return Resolution(None, (), tuple(problems), unknown, groups)
    empty = [_without_units(group, i, subject) for i, group in enumerate(groups) if group.num_units == 0]
    if empty:
        return Resolution(None, problems=tuple(empty), groups=groups)
    return Resolution(selection_of(topology, groups), groups=groups)


def _unknown_group(topology: ClusterTopology, label: str, index: int, subject: str) -> PlacementProblem:
    hint = did_you_mean(label, topology.groups) or f"the groups are {quoted(topology.groups)}"
    message = f"{subject} is placed on node group `{label}`, which does not exist"
    return PlacementProblem("unknown-node-group", message, hint, label=index)


def _listed_twice(labels: Sequence[str], subject: str) -> list[PlacementProblem]:
    listed: set[str] = set()
    problems: list[PlacementProblem] = []
    for index, label in enumerate(labels):
        if label in listed:
            message = f"{subject} lists node group `{label}` twice"
            problems.append(PlacementProblem("groups-overlap", message, "name each group once", label=index))
        listed.add(label)
    return problems


def _mixed_units(groups: Sequence[NodeGroupInfo], subject: str) -> list[PlacementProblem]:
    units = {group.unit for group in groups}
    # A group with unknown accelerators may count accelerators or nodes, but never robots.
    certain = [unit for unit in units if unit is not None]
    if len(certain) < 2 and not (None in units and any(unit.robot for unit in certain)):
        return []
    counts = ", ".join(
        f"`{group.label}` counts {group.unit.plural if group.unit else 'accelerators or nodes'}" for group in groups
    )
    first = groups[0].unit
    other = next(index for index, group in enumerate(groups) if group.unit != first)
    return [
        PlacementProblem(
            "groups-mixed-units",
            f"{subject} mixes groups that count different things: {counts}",
            "select groups that count the same units, or split the component in two",
            label=other,
        )
    ]


def _overlaps(topology: ClusterTopology, groups: Sequence[NodeGroupInfo], subject: str) -> list[PlacementProblem]:
    problems: list[PlacementProblem] = []
    for index, group in enumerate(groups):
        for other in groups[:index]:
            if group.unit is None or group.unit != other.unit:
                continue
            shared = intersect(group.segments, other.segments)
            if not shared:
                continue
            nodes = merge_ranges(map(topology.numbers(group.unit).nodes_of, shared))
            where = nodes_text(rank for piece in nodes for rank in piece)
            message = f"{subject} selects `{other.label}` and `{group.label}`, which share {where}"
            help = "the groups of a component may not share units: remove one, or narrow its `node_ranks`"
            problems.append(PlacementProblem("groups-overlap", message, help, label=index))
    return problems


def _without_units(group: NodeGroupInfo, index: int, subject: str) -> PlacementProblem:
    what = group.unit.plural if group.unit else "units"
    return PlacementProblem(
        "group-without-units",
        f"{subject} is placed on node group `{group.label}`, which has no {what}",
        "declare its `hardware.configs`, or remove `hardware` to count accelerators or nodes",
        label=index,
    )


# Cached because checks, layout and strategies repeat the call; a topology is compared by identity, which is cheap.
@lru_cache(maxsize=256)
def resolve(component: str, rank_map: RankMap, labels: tuple[str, ...], topology: ClusterTopology) -> Resolution:
    """Resolve the rank map of `component` on the groups `labels` (none means `cluster`)."""
    selected = select(topology, labels, f"component `{component}`")
    parts = _Parts(component, selected.selection, selected.groups)
    for part in rank_map.parts:
        parts.take(part)
    return selected._replace(
        blocks=tuple(parts.blocks),
        problems=(*selected.problems, *parts.problems),
        by_number=any(part.resources is not None for part in rank_map.parts),
    )


class _Parts:
    """A checker of a rank map's parts; a mistake in one part does not affect the check of the next."""

    def __init__(self, component: str, selection: Selection | None, groups: tuple[NodeGroupInfo, ...]) -> None:
        self.component = component
        self.selection = selection
        self.name = quoted(group.label for group in groups)
        self.blocks: list[Block] = []
        self.problems: list[PlacementProblem] = []
        self._taken: list[RankMapPart] = []
        self._taken_all = False
        self._next_resource = 0
        self._next_process: int | None = 0

    def take(self, part: RankMapPart) -> None:
        resources = self._resources(part)
        in_order = self._check_order(part, resources)
        within = resources is not None and self._check_bounds(part, resources)
        processes = self._processes(part, resources)
        if resources is None or processes is None:
            return
        if not self._check_counts(part, resources, processes):
            # Either end of the part may be wrong, so the start of the next one is unknown.
            self._next_process = None
        else:
            block = Block(resources, processes)
            if in_order and within and self._check_nodes(part, block):
                self.blocks.append(block)

    def _report(self, code: str, message: str, part: RankMapPart, help: str | None) -> bool:
        self.problems.append(PlacementProblem(code, f"component `{self.component}` {message}", help, part))
        return False

    def _resources(self, part: RankMapPart) -> range | None:
        """Return the resources of the part; None for `all` if their number is unknown."""
        if part.resources is not None:
            return part.resources
        return range(self.selection.count) if self.selection else None

    def _check_order(self, part: RankMapPart, resources: range | None) -> bool:
        earlier, self._taken = self._taken, [*self._taken, part]
        if part.resources is None or self._taken_all:
            self._taken_all = True
            if not earlier:
                return True
            help = "`all` covers every resource: write it alone, or list the resources explicitly"
            return self._report("placement-not-ascending", f"lists resources of {self.name} twice", part, help)
        ranks = part.resources
        if ranks.start >= self._next_resource:
            self._next_resource = ranks.stop
            return True
        twice = next((r for other in earlier if other.resources and (r := common(other.resources, ranks))), None)
        self._next_resource = max(self._next_resource, ranks.stop)
        if twice is not None:
            message = f"lists resource{'s' * (len(twice) > 1)} {format_range(twice)} of {self.name} twice"
            help = f"the next part may start at {earlier[-1].resources.stop}" if earlier[-1].resources else None
            if part.processes is None or len(ranks) == 1:
                help = "for several processes per resource write them after a colon, as in `0-3:0-7`"
            return self._report("placement-not-ascending", message, part, help)
        before = earlier[-1].resources
        message = f"lists resources {format_range(ranks)} after {format_range(before) if before else 'all'}"
        return self._report("placement-not-ascending", message, part, self._sorted(earlier, part))

    def _sorted(self, earlier: list[RankMapPart], part: RankMapPart) -> str:
        parts = [*earlier, part]
        if any(part.processes is not None for part in parts):
            return "write the parts in ascending order of their resources; process ranks follow that order"
        ordered = sorted(parts, key=lambda part: part.resources.start if part.resources else 0)
        return f"did you mean `{','.join(map(str, ordered))}`? Process ranks follow the order of resources"

    def _check_bounds(self, part: RankMapPart, resources: range) -> bool:
        selection = self.selection
        if selection is None or resources.stop <= selection.count:
            return True
        beyond = range(max(resources.start, selection.count), resources.stop)
        plural = len(selection.groups) > 1
        message = (
            f"asks for resource{'s' * (len(beyond) > 1)} {format_range(beyond)}, but {self.name} "
            f"{'have' if plural else 'has'} {selection.exist}"
        )
        size = min(len(resources), selection.count)
        if resources.start < selection.count:
            meant = format_range(range(resources.start, selection.count))
        else:
            meant = format_range(range(size))
        why = "" if resources.start < selection.count or plural else "; ranks count within the group, from 0"
        if resources == range(1, selection.count + 1):
            meant, why = format_range(range(selection.count)), "; ranks begin at 0"
        if selection.lacks_accelerators:
            why = "; no accelerator found, so ranks count nodes (`rlinf doctor` shows each node's accelerators)"
        help = f"{selection.describe()}{why}; did you mean {meant}?"
        return self._report("placement-out-of-range", message, part, help)

    def _processes(self, part: RankMapPart, resources: range | None) -> range | None:
        """Return the part's process ranks; None if unknown."""
        expected = self._next_process
        processes = part.processes
        if processes is None:
            if expected is None or resources is None:
                self._next_process = None
                return None
            processes = range(expected, expected + len(resources))
        elif expected is not None and processes.start != expected:
            self._report_gap(part, processes, expected)
        self._next_process = processes.stop
        return processes

    def _report_gap(self, part: RankMapPart, processes: range, expected: int) -> None:
        meant = range(expected, expected + len(processes))
        shown = RankMapPart(part.resources, meant, part.start, part.end)
        if expected == 0:
            message = f"starts its process ranks at {processes.start} instead of 0"
        elif processes.start > expected:
            missing = format_range(range(expected, processes.start))
            message = f"skips process rank{'s' * ('-' in missing)} {missing}"
        else:
            again = range(processes.start, min(processes.stop, expected))
            message = f"lists process rank{'s' * (len(again) > 1)} {format_range(again)} twice"
        self._report("process-ranks-gap", message, part, f"process ranks must be consecutive; did you mean `{shown}`?")

    def _check_counts(self, part: RankMapPart, resources: range, processes: range) -> bool:
        have, want = len(resources), len(processes)
        if have and want and (have % want == 0 or want % have == 0):
            return True
        near = _nearest_count(have, want) if have else 0
        message = f"puts {want} process{'es' * (want != 1)} on {have} resources: neither number divides the other"
        shown = RankMapPart(part.resources, range(processes.start, processes.start + near), part.start, part.end)
        help = f"the number of processes must divide {have} or be a multiple of it; did you mean `{shown}`?"
        return self._report("placement-counts-dont-divide", message, part, help)

    def _check_nodes(self, part: RankMapPart, block: Block) -> bool:
        selection = self.selection
        if selection is None or len(block.resources) == len(block.processes) or block.density > 1:
            return True
        for rank, resources in zip(block.processes, block, strict=True):
            first, last = selection.locate(resources.start), selection.locate(resources.stop - 1)
            if first.node != last.node:
                message = (
                    f"gives process {rank} the resources {format_range(resources)} of {self.name}, which are on"
                    f" nodes {first.node} and {last.node}"
                )
                if selection.unit.kind is UnitKind.NODE:
                    help = "a process runs on one node: place one process per node"
                else:
                    help = f"a process runs on one node ({selection.describe()}): start at a node's first resource, or"
                    help += " use fewer per process"
                return self._report("process-spans-nodes", message, part, help)
        return True


def _nearest_count(resources: int, wanted: int) -> int:
    """Return the number of processes nearest to `wanted` that divides `resources` or is a multiple of it."""
    if wanted > resources:
        low = wanted // resources * resources
        return low if wanted - low < low + resources - wanted else low + resources
    divisors = {d for low in range(1, int(resources**0.5) + 1) if resources % low == 0 for d in (low, resources // low)}
    return min(divisors, key=lambda d: (abs(d - wanted), -d))
