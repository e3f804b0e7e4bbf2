"""What is legal but looks like a mistake: idle accelerators, crowding, half-shared hardware, unused interpreters."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from rlinf_core.config.cluster import ClusterConfig, EnvConfig
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.places import place
from rlinf_core.config.ranks import format_range, format_ranks, merge_ranges
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Mapping, Path
from rlinf_core.placement.coverage import Coverage, coverage, intersect, overlapping, subtract
from rlinf_core.placement.written import Placed, group_paths, map_path
from rlinf_core.topology import ACCELERATORS, RESERVED_LABELS, ClusterTopology, UnitKind

# A warning lists no more places than a reader takes in.
_LISTED = 3


def suspicious(
    tree: Mapping, cluster: ClusterConfig, topology: ClusterTopology, placed: Sequence[Placed]
) -> Iterator[Diagnostic]:
    """Warnings about placements that are sound (but may count accelerators that are unknown)."""
    if not placed:
        return
    look = _Look(tree, cluster, topology, placed)
    yield from look.idle_accelerators()
    yield from look.denser_placements()
    yield from look.partial_sharing()
    yield from look.unused_interpreters()


class _Look:
    def __init__(
        self, tree: Mapping, cluster: ClusterConfig, topology: ClusterTopology, placed: Sequence[Placed]
    ) -> None:
        self.tree = tree
        self.cluster = cluster
        self.topology = topology
        self.paths = group_paths(tree)
        self.coverages = [(each, covered) for each in placed if (covered := coverage(each.resolution))]
        # Where the resources of a component are unknown it may use any node of its groups.
        self.uncertain = merge_ranges(
            nodes
            for each in placed
            if each.resolution.selection is None
            for group in each.resolution.groups
            for nodes in group.node_ranges
        )

    def _warn(
        self, code: str, message: str, path: Path, help: str, related: tuple[tuple[Span, str], ...] = ()
    ) -> Diagnostic:
        return Diagnostic(code, Severity.WARNING, message, place(self.tree, path), path, help, related)

    def idle_accelerators(self) -> Iterator[Diagnostic]:
        """Accelerators that no component holds, by the group that counts them."""
        numbers = self.topology.numbers(ACCELERATORS)
        held = [piece for _, covered in self.coverages if covered.unit == ACCELERATORS for piece in covered.ranges]
        taken = merge_ranges([*held, *(numbers.on(nodes) for nodes in self.uncertain)])
        groups = [group for group in self.topology.groups.values() if group.label not in RESERVED_LABELS]
        counting = sorted(
            ((units, group.label) for group in groups if group.unit == ACCELERATORS for units in group.segments),
            key=lambda pair: pair[0].start,
        )
        # An accelerator of two groups is told of once, with the one that begins first.
        own: dict[str, list[range]] = {}
        reach = 0
        for units, label in counting:
            own.setdefault(label, []).append(range(max(units.start, reach), units.stop))
            reach = max(reach, units.stop)
        for label, segments in own.items():
            idle = _left(segments, taken)
            if idle:
                at: Path = (*self.paths[label], "label") if label in self.paths else ("cluster", "num_nodes")
                yield self._idle(f"of `{label}`", idle, at)
        grouped = merge_ranges(nodes for group in groups for nodes in group.node_ranges)
        loose = subtract((range(self.topology.num_nodes),), grouped)
        idle = subtract(merge_ranges(numbers.on(nodes) for nodes in loose), taken)
        if idle:
            yield self._idle("of nodes in no group", idle, ("cluster", "num_nodes"))

    def _idle(self, whose: str, idle: Sequence[range], path: Path) -> Diagnostic:
        count = sum(map(len, idle))
        what = f"1 accelerator {whose} is" if count == 1 else f"{count} accelerators {whose} are"
        message = f"{what} used by no component: {self._listed(idle)}"
        return self._warn("idle-accelerators", message, path, "place a component on them, or leave the nodes out")

    def _listed(self, units: Iterable[range]) -> str:
        """Return `4-7 on nodes 0-3, 0 on node 5`: accelerators by the nodes they are on."""
        numbers = self.topology.numbers(ACCELERATORS)
        on_node: dict[int, list[range]] = {}
        for piece in units:
            at = piece.start
            while at < piece.stop:
                node = numbers.node_of(at)
                own = numbers.on_node(node)
                stop = min(piece.stop, own.stop)
                on_node.setdefault(node, []).append(range(at - own.start, stop - own.start))
                at = stop
        alike: dict[str, list[int]] = {}
        for node, pieces in on_node.items():
            alike.setdefault(",".join(map(format_range, pieces)), []).append(node)
        shown = [f"{local} on {_nodes(nodes)}" for local, nodes in list(alike.items())[:_LISTED]]
        return ", ".join(shown) + (" and others" if len(alike) > _LISTED else "")

    def denser_placements(self) -> Iterator[Diagnostic]:
        """Components with at least two processes an accelerator where no other has more than half as many."""
        densities = [
            (each, each.resolution.world_size / len(covered))
            for each, covered in self.coverages
            if covered.unit == ACCELERATORS
        ]
        if len(densities) < 2:
            return
        ranked = sorted(densities, key=lambda pair: -pair[1])
        (densest, density), (next_one, next_density) = ranked[:2]
        if density >= 2 and density >= 2 * next_density:
            yield self._warn(
                "denser-placement",
                f"component `{densest.name}` puts {density:g} processes on each accelerator, `{next_one.name}` puts"
                f" {next_density:g}",
                map_path(self.tree, densest.path),
                "check that the processes fit into an accelerator's memory, or give them more accelerators",
            )

    def partial_sharing(self) -> Iterator[Diagnostic]:
        """Pairs of components that share some hardware while each has some to itself."""
        distinct: dict[Coverage, Placed] = {}
        for each, covered in self.coverages:
            if covered.unit.kind is not UnitKind.NODE:
                distinct.setdefault(covered, each)
        for unit in dict.fromkeys(covered.unit for covered in distinct):
            alike = [(covered, each) for covered, each in distinct.items() if covered.unit == unit]
            for first, second in overlapping(covered.ranges for covered, _ in alike):
                (theirs, other), (ours, each) = alike[first], alike[second]
                shared = sum(map(len, intersect(ours.ranges, theirs.ranges)))
                if shared < min(len(ours), len(theirs)):
                    yield self._warn(
                        "partial-sharing",
                        f"components `{other.name}` and `{each.name}` share {unit.counted(shared)}, and each has"
                        " others to itself",
                        map_path(self.tree, each.path),
                        "place them on the same resources, or on separate ones; leave it if it is meant",
                        ((place(self.tree, map_path(self.tree, other.path)), f"`{other.name}` is placed at"),),
                    )

    def unused_interpreters(self) -> Iterator[Diagnostic]:
        """Interpreters given for nodes on which no component has a process."""
        used = merge_ranges([*self.uncertain, *self._used_nodes()])
        for group in self.cluster.node_groups:
            path = self.paths.get(group.label)
            if path is None:
                continue
            own = self.topology.groups[group.label].node_ranges
            for index, config in enumerate(group.env_configs):
                if config.python_interpreter_path is None:
                    continue
                idle = _left(_nodes_of(config, own), used)
                if idle:
                    nodes = _nodes([rank for piece in idle for rank in piece])
                    yield self._warn(
                        "unused-interpreter",
                        f"no component has a process on {nodes}, for which `{group.label}` gives an interpreter",
                        (*path, "env_configs", index, "python_interpreter_path"),
                        "place a component there, or leave the nodes out",
                    )

    def _used_nodes(self) -> Iterator[range]:
        for _, covered in self.coverages:
            numbers = self.topology.numbers(covered.unit)
            for units in covered.ranges:
                yield range(numbers.node_of(units.start), numbers.node_of(units.stop - 1) + 1)


def _nodes_of(config: EnvConfig, group: tuple[range, ...]) -> tuple[range, ...]:
    """Return the nodes of a group's `env_configs` entry; `all` is the whole group."""
    written = config.node_ranks.ranges
    return group if written is None else intersect(group, merge_ranges(written))


def _left(pieces: Sequence[range], taken: tuple[range, ...]) -> tuple[range, ...]:
    """Return `subtract`, but looking only at what is near: for few pieces and much that is taken."""
    left: list[range] = []
    for piece in pieces:
        first = bisect_right(taken, piece.start, key=lambda each: each.stop)
        last = bisect_left(taken, piece.stop, lo=first, key=lambda each: each.start)
        left += subtract((piece,), taken[first:last])
    return tuple(left)


def _nodes(ranks: Sequence[int]) -> str:
    return f"node{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"
