"""Warnings and notes about legal placements: idle or shared accelerators, crowding, unused environments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.ranks import format_range, intersect, merge_ranges, nodes_text, subtract
from rlinf_core.config.sections.cluster import RESERVED_LABELS, ClusterConfig, EnvConfig
from rlinf_core.config.tree import (
    MappingNode,
    Path,
    ScalarNode,
    SequenceNode,
    Span,
    entry_at,
    find,
    format_path,
    naming,
    place,
)
from rlinf_core.job.load import Job
from rlinf_core.job.report import GROUPS, component_paths, map_path
from rlinf_core.placement.resolve import Coverage, Resolution
from rlinf_core.suggest import quoted
from rlinf_core.topology import ACCELERATORS, CLUSTER_LABEL, ClusterTopology, UnitKind

every = chain.from_iterable
# A warning lists at most this many places.
_LISTED = 3


class Placed(NamedTuple):
    """A component as the file places it: name, path of its entry, and resolved placement."""

    name: str
    path: Path
    resolution: Resolution


def lint(job: Job) -> Iterator[Diagnostic]:
    """Yield warnings and notes about a file's placement. While a component's placement is unknown, most are skipped."""
    if job.tree is None or job.cluster is None or job.topology is None:
        return
    paths = component_paths(job.tree)
    placed = [Placed(name, path, job.resolutions[name]) for name, path in paths.items() if name in job.resolutions]
    linter = _Linter(job.tree, job.cluster, job.topology, placed)
    yield from linter.unknown_accelerators()
    if not placed or len(placed) < len(paths) or any(component.resolution.problems for component in placed):
        return
    yield from linter.dropped_groups()
    yield from linter.missing_accelerators()
    yield from linter.idle_accelerators()
    yield from linter.idle_nodes()
    yield from linter.idle_robots()
    yield from linter.denser_placements()
    yield from linter.partial_sharing()
    yield from linter.unused_interpreters()
    yield from linter.unused_env_configs()
    yield from linter.accelerators_not_reserved()


class _Linter:
    def __init__(
        self, tree: MappingNode, cluster: ClusterConfig, topology: ClusterTopology, placed: Sequence[Placed]
    ) -> None:
        self.tree = tree
        self.cluster = cluster
        self.topology = topology
        self.placed = placed
        self.paths = group_paths(tree)
        self.coverages = [(component, covered) for component in placed if (covered := component.resolution.coverage())]
        # A component whose resources are unknown may use any node of its groups.
        unknown = (component.resolution for component in placed if component.resolution.selection is None)
        self.uncertain = merge_ranges(
            nodes for resolution in unknown for group in resolution.groups for nodes in group.node_ranges
        )
        self.nodes = [(component, component.resolution.nodes()) for component in placed]

    def _warn(
        self, code: str, message: str, path: Path, help: str, related: tuple[tuple[Span, str], ...] = ()
    ) -> Diagnostic:
        return Diagnostic(code, Severity.WARNING, message, place(self.tree, path), path, help, related)

    def _note(self, code: str, message: str, path: Path, help: str) -> Diagnostic:
        return Diagnostic(code, Severity.NOTE, message, place(self.tree, path), path, help)

    def unknown_accelerators(self) -> Iterator[Diagnostic]:
        """Yield a diagnostic for each group with undeclared accelerators, with the components that count them."""
        users: dict[str, list[Placed]] = {}
        for component in self.placed:
            for label in component.resolution.unknown:
                users.setdefault(label, []).append(component)
        for label, components in users.items():
            names = [f"`{component.name}`" for component in components]
            listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
            ranks = self.topology.groups[label].node_ranks
            nodes = nodes_text([rank for rank in ranks if self.topology.nodes[rank].num_accelerators is None])
            argument = "8" if label == CLUSTER_LABEL else f"{label}=8"
            group = "the group" if self.cluster.node_groups else "a node group"
            path = self.paths.get(label) if label not in RESERVED_LABELS else None
            yield Diagnostic(
                "accelerators-unknown",
                Severity.NOTE,
                f"the accelerators of `{label}` ({nodes}) are not declared: the resource ranks of {listed} can only"
                " be checked on the nodes",
                place(self.tree, (*path, "label")) if path else naming(self.tree, components[0].path),
                path or components[0].path,
                f"declare `accelerators: {{per_node: 8}}` in {group} (`per_node: 0` where it has no GPU), or try"
                f" `--assume {argument}`",
            )

    def dropped_groups(self) -> Iterator[Diagnostic]:
        """Report rank maps that replace an entry of a lower layer with a node group."""
        for component in self.placed:
            entry = entry_at(self.tree, component.path)
            before = find(entry.replaced[0].value, ("node_group",)) if entry and entry.replaced else None
            if entry is not None and before is not None and not isinstance(entry.value, MappingNode):
                yield self._warn(
                    "node-group-dropped",
                    f"`{component.name}` was placed with `node_group: {before.span.text}`, and a rank map alone counts"
                    " over `cluster`",
                    component.path,
                    f"to keep the group, set `{format_path((*component.path, 'placement'))}` instead",
                    ((before.span, "the group is set at"),),
                )

    def missing_accelerators(self) -> Iterator[Diagnostic]:
        """Yield a warning for each component placed on accelerator ranks of nodes without accelerators."""
        for component in self.placed:
            if component.resolution.lacks_accelerators:
                on = nodes_text(every(merge_ranges(every(component.resolution.nodes().values()))))
                yield self._warn(
                    "no-accelerator-found",
                    f"no accelerator found on {on}: `{component.name}` is placed by rank, and would run on the CPU",
                    map_path(self.tree, component.path),
                    "`rlinf doctor` shows each node's accelerators; write `node_group: node` to run on the CPU",
                )

    def idle_accelerators(self) -> Iterator[Diagnostic]:
        """Report accelerators that no component uses, by the group that counts them."""
        numbers = self.topology.numbers(ACCELERATORS)
        held = [piece for _, covered in self.coverages if covered.unit == ACCELERATORS for piece in covered.ranges]
        taken = merge_ranges([*held, *(numbers.on(nodes) for nodes in self.uncertain)])
        groups = [group for group in self.topology.groups.values() if group.label not in RESERVED_LABELS]
        counting = sorted(
            ((units, group.label) for group in groups if group.unit == ACCELERATORS for units in group.segments),
            key=lambda pair: pair[0].start,
        )
        # Report an accelerator of two groups once, with the group that begins first.
        own: dict[str, list[range]] = {}
        reach = 0
        for units, label in counting:
            own.setdefault(label, []).append(range(max(units.start, reach), units.stop))
            reach = max(reach, units.stop)
        for label, segments in own.items():
            idle = subtract(segments, taken)
            if idle:
                at: Path = (*self.paths[label], "label") if label in self.paths else ("cluster", "num_nodes")
                yield self._idle(f"of `{label}`", idle, at, self._meant_range(idle))
        grouped = merge_ranges(nodes for group in groups for nodes in group.node_ranges)
        loose = subtract((range(self.topology.num_nodes),), grouped)
        idle = subtract(merge_ranges(numbers.on(nodes) for nodes in loose), taken)
        if idle:
            yield self._idle("of nodes in no group", idle, ("cluster", "num_nodes"))

    def idle_nodes(self) -> Iterator[Diagnostic]:
        """Report nodes without accelerators, robots and processes, except the driver's node."""
        used = {rank for _, by_label in self.nodes for nodes in by_label.values() for rank in every(nodes)}
        groups = [group for group in self.topology.groups.values() if group.label not in RESERVED_LABELS]
        robots = [group for group in groups if group.unit is not None and group.unit.kind is UnitKind.ROBOT]
        used |= {0, *(rank for group in robots for rank in group.node_ranks)}
        # `unused_interpreters` reports these.
        used |= {
            rank
            for group in self.cluster.node_groups
            for entry in group.env_configs
            if entry.python_interpreter_path is not None and group.label in self.topology.groups
            for rank in every(_nodes_of(entry, self.topology.groups[group.label].node_ranges))
        }
        for group in groups:
            free = [rank for rank in group.node_ranks if rank not in used]
            idle = [rank for rank in free if not self.topology.nodes[rank].num_accelerators]
            if idle and group.label in self.paths:
                used.update(idle)
                yield self._warn(
                    "idle-nodes",
                    f"no process is placed on {nodes_text(idle)} of `{group.label}`",
                    (*self.paths[group.label], "label"),
                    "place a component there, or remove the nodes",
                )
        used.update(rank for group in groups for rank in group.node_ranks)
        used.update(every(self.uncertain))
        loose = [node.rank for node in self.topology.nodes if node.rank not in used and not node.num_accelerators]
        if loose:
            message = f"no process is placed on {nodes_text(loose)} (in no node group)"
            yield self._warn(
                "idle-nodes", message, ("cluster", "num_nodes"), "place a component there, or lower `num_nodes`"
            )

    def idle_robots(self) -> Iterator[Diagnostic]:
        """Report groups of robots on which no component is placed."""
        used = {group.label for component, _ in self.nodes for group in component.resolution.groups}
        for group in self.topology.groups.values():
            robots = group.unit is not None and group.unit.kind is UnitKind.ROBOT
            if robots and group.label not in used and group.label in self.paths:
                message = f"no component is placed on the robots of `{group.label}`"
                help = f"place the environments with `node_group: {group.label}`, or remove the group"
                yield self._warn("idle-robots", message, (*self.paths[group.label], "label"), help)

    def _meant_range(self, idle: Sequence[range]) -> str:
        """Return a hint that `[0, 15]` was probably meant as a range, if all accelerators between the two are idle."""
        for component, covered in self.coverages:
            parts = self.cluster.component_placement[component.name].rank_map.parts
            ends = [part.resources for part in parts if part.resources is not None and part.processes is None]
            first, last = covered.ranges[0].start, covered.ranges[-1].stop - 1
            between = range(first + 1, last)
            if len(parts) == 2 and [len(end) for end in ends] == [1, 1] and between and not subtract((between,), idle):
                meant = format_range(range(ends[0].start, ends[1].stop))
                return f"`{component.name}` is placed on two accelerators: did you mean `{meant}`? Otherwise "
        return ""

    def _idle(self, whose: str, idle: Sequence[range], path: Path, meant: str = "") -> Diagnostic:
        count = sum(map(len, idle))
        what = f"1 accelerator {whose} is" if count == 1 else f"{count} accelerators {whose} are"
        message = f"{what} used by no component: {self._listed(idle)}"
        return self._warn("idle-accelerators", message, path, f"{meant}place a component on them, or remove the nodes")

    def _listed(self, units: Iterable[range]) -> str:
        """Return accelerators by node, as in `4-7 on nodes 0-3, 0 on node 5`."""
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
        shown = [f"{local} on {nodes_text(nodes)}" for local, nodes in list(alike.items())[:_LISTED]]
        return ", ".join(shown) + (" and others" if len(alike) > _LISTED else "")

    def denser_placements(self) -> Iterator[Diagnostic]:
        """Report components with at least two processes per accelerator, twice as many as any other."""
        densities = [
            (component, component.resolution.world_size / len(covered))
            for component, covered in self.coverages
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
                "check that the processes fit in an accelerator's memory, or assign more accelerators",
            )

    def partial_sharing(self) -> Iterator[Diagnostic]:
        """Report pairs of components that share some hardware while each has some to itself."""
        distinct: dict[Coverage, Placed] = {}
        for component, covered in self.coverages:
            if covered.unit.kind is not UnitKind.NODE:
                distinct.setdefault(covered, component)
        for unit in dict.fromkeys(covered.unit for covered in distinct):
            alike = [(covered, component) for covered, component in distinct.items() if covered.unit == unit]
            for first, second in overlapping(covered.ranges for covered, _ in alike):
                (theirs, other), (ours, component) = alike[first], alike[second]
                shared = sum(map(len, intersect(ours.ranges, theirs.ranges)))
                if shared < min(len(ours), len(theirs)):
                    yield self._warn(
                        "partial-sharing",
                        f"components `{other.name}` and `{component.name}` share {unit.counted(shared)}, and each has"
                        " others of its own",
                        map_path(self.tree, component.path),
                        "place them on the same resources or on separate ones, or ignore this if it is intended",
                        ((place(self.tree, map_path(self.tree, other.path)), f"`{other.name}` is placed at"),),
                    )

    def unused_interpreters(self) -> Iterator[Diagnostic]:
        """Report interpreters set for nodes on which their group places no process, and variables if the nodes are in
        other groups, too; `unused_env_configs` reports the other variables."""
        several = _covered_twice(self.topology.groups[group.label].node_ranges for group in self.cluster.node_groups)
        used: dict[str, list[range]] = {}
        for _, by_label in self.nodes:
            for label, nodes in by_label.items():
                used.setdefault(label, []).extend(nodes)
        for group in self.cluster.node_groups:
            path = self.paths.get(group.label)
            if path is None:
                continue
            own = self.topology.groups[group.label].node_ranges
            for index, config in enumerate(group.env_configs):
                idle = subtract(_nodes_of(config, own), merge_ranges(used.get(group.label, ())))
                what, key = "an interpreter", "python_interpreter_path"
                if config.python_interpreter_path is None:
                    what, key = "variables", "env_vars"
                    idle = intersect(merge_ranges(idle), several) if config.env_vars else ()
                if idle:
                    yield self._warn(
                        "unused-interpreter",
                        f"`{group.label}` places no process on {nodes_text(every(idle))}, for which it sets {what}",
                        (*path, "env_configs", index, key),
                        f"place a component there with `node_group: {group.label}`, or remove the nodes",
                    )

    def unused_env_configs(self) -> Iterator[Diagnostic]:
        """Report components placed through `cluster` or `node` on nodes whose only group has `env_configs`."""
        ranges = {group.label: self.topology.groups[group.label].node_ranges for group in self.cluster.node_groups}
        several = _covered_twice(ranges.values())
        alone = {
            group.label: subtract(
                merge_ranges(piece for entry in group.env_configs for piece in _nodes_of(entry, ranges[group.label])),
                several,
            )
            for group in self.cluster.node_groups
            if group.env_configs
        }
        for _, by_label in self.nodes:
            # On nodes where another component is placed through the group, the difference is intended.
            for label in alone.keys() & by_label.keys():
                alone[label] = subtract(alone[label], merge_ranges(by_label[label]))
        for component, by_label in self.nodes:
            for through in RESERVED_LABELS:
                own = by_label.get(through, ())
                missed = {label: nodes for label, ranges in alone.items() if (nodes := intersect(ranges, own))}
                if missed:
                    first = list(missed.items())[:_LISTED]
                    listed = ", ".join(f"`{label}` on {nodes_text(every(nodes))}" for label, nodes in first)
                    listed += " and others" if len(missed) > _LISTED else ""
                    yield self._note(
                        "env-configs-unused",
                        f"`{component.name}` is placed through `{through}`: the `env_configs` of {listed} do not apply",
                        _group_path(self.tree, component.path),
                        f"place it with `node_group: {next(iter(missed))}` if they should",
                    )

    def accelerators_not_reserved(self) -> Iterator[Diagnostic]:
        """Report components that are placed without accelerators where others have some: they see all accelerators."""
        numbers = self.topology.numbers(ACCELERATORS)
        holding = [(component, covered.ranges) for component, covered in self.coverages if covered.unit == ACCELERATORS]
        if not holding:
            return
        for viewer, covered in self.coverages:
            if covered.unit == ACCELERATORS:
                continue
            visible = merge_ranges(numbers.on(piece) for piece in every(viewer.resolution.nodes().values()))
            shared = {other.name: intersect(ranges, visible) for other, ranges in holding}
            names = [name for name, pieces in shared.items() if pieces]
            if names:
                where = merge_ranges(map(numbers.nodes_of, every(shared.values())))
                holds = "hold" if len(names) > 1 else "holds"
                yield self._note(
                    "accelerators-not-reserved",
                    f"`{viewer.name}` sees all accelerators of {nodes_text(every(where))}, none reserved for it;"
                    f" {quoted(names)} {holds} some of them",
                    map_path(self.tree, viewer.path),
                    "place it on accelerators if it uses one",
                )


def group_paths(tree: MappingNode) -> dict[str, Path]:
    """Return the path of each node group by its label."""
    paths: dict[str, Path] = {}
    groups = find(tree, GROUPS)
    for index, group in enumerate(groups.items if isinstance(groups, SequenceNode) else ()):
        label = find(group, ("label",))
        if isinstance(label, ScalarNode):
            paths.setdefault(label.raw, (*GROUPS, index))
    return paths


def _group_path(tree: MappingNode, entry: Path) -> Path:
    """Return the path of the node groups in a component's entry, or of its rank map if the entry names no group."""
    path = (*entry, "node_group")
    return map_path(tree, entry) if find(tree, path) is None else path


def overlapping(lists: Iterable[tuple[range, ...]]) -> list[tuple[int, int]]:
    """Return the pairs of range lists that overlap, as ascending indices."""
    pieces = sorted((piece.start, piece.stop, index) for index, pieces in enumerate(lists) for piece in pieces)
    pairs: set[tuple[int, int]] = set()
    # The pieces that extend past the start of the current piece.
    open_: list[tuple[int, int]] = []
    for start, stop, index in pieces:
        open_ = [(end, other) for end, other in open_ if end > start]
        pairs |= {(min(index, other), max(index, other)) for _, other in open_ if other != index}
        open_.append((stop, index))
    return sorted(pairs)


def _covered_twice(lists: Iterable[tuple[range, ...]]) -> tuple[range, ...]:
    """Return the numbers that are in more than one of the lists of disjoint ranges."""
    twice: list[range] = []
    reach = 0
    for piece in sorted((piece for pieces in lists for piece in pieces), key=lambda piece: piece.start):
        twice.append(range(piece.start, min(piece.stop, reach)))
        reach = max(reach, piece.stop)
    return merge_ranges(piece for piece in twice if piece)


def _nodes_of(config: EnvConfig, group: tuple[range, ...]) -> tuple[range, ...]:
    """Return the nodes of a group's `env_configs` entry; `all` is the whole group."""
    written = config.node_ranks.ranges
    return group if written is None else intersect(group, merge_ranges(written))
