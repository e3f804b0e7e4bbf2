"""The topology of a cluster: its nodes, its node groups, and the units of their resource ranks.

It is built from a configuration alone (declared or assumed accelerators) or from probed nodes. Units are numbered over
the whole cluster, node by node, separately for accelerators, each type of robot, and nodes. A group is a few ranges of
these numbers, so that 10,000 nodes cost little more than one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from rlinf_core.config.ranks import format_ranks, merge_ranges
from rlinf_core.config.sections.cluster import CLUSTER_LABEL, NODE_LABEL, ClusterConfig, NodeGroup
from rlinf_core.config.sections.hardware_rules import accelerator_claims
from rlinf_core.errors import PlacementError
from rlinf_core.hardware.accelerators import accelerator_of_model
from rlinf_core.hardware.robots import UNKNOWN_TYPE, RobotUnit
from rlinf_core.suggest import did_you_mean, quoted


class UnitKind(StrEnum):
    """The kind of unit that a resource rank counts."""

    ACCELERATOR = "accelerator"
    ROBOT = "robot"
    NODE = "node"


class Unit(NamedTuple):
    """The unit that a group's resource ranks count; `robot` is the `hardware.type` if they count robots."""

    kind: UnitKind
    robot: str | None = None

    def counted(self, count: int) -> str:
        """Return `8 accelerators`, `1 node`, `2 Franka units`."""
        return f"{count} {self._singular if count == 1 else self.plural}"

    @property
    def plural(self) -> str:
        return f"{self._singular}s"

    @property
    def _singular(self) -> str:
        if not self.robot:
            return str(self.kind)
        return "unit" if self.robot == UNKNOWN_TYPE else f"{self.robot} unit"


ACCELERATORS = Unit(UnitKind.ACCELERATOR)
NODES = Unit(UnitKind.NODE)


class Robot(NamedTuple):
    """A robot on a node: its `hardware.type` and its configuration."""

    type: str
    config: RobotUnit


class NodeInfo(NamedTuple):
    """One node.

    Attributes:
        rank: its rank in the cluster, from 0.
        num_accelerators: their number, or None if unknown.
        accelerator_type: their vendor, as in `NVIDIA`, which determines the visibility variable; None if unknown or
            none.
        accelerator_model: the accelerator model, as in `A800`, or None.
        accelerator_ids: their names in the visibility variable, in order; empty if these are `0`, `1`, ...
        accelerator_identities: each accelerator's names among the machine's devices, in order; empty if not probed.
        robots: the robots in the order of `hardware.configs`.
        ip, hostname, python, versions: the facts from a probe; None and empty without one. `python` is Ray's
            interpreter there, `versions` holds pairs such as `("ray", "2.60.0")`.
    """

    rank: int
    num_accelerators: int | None = None
    accelerator_type: str | None = None
    accelerator_model: str | None = None
    accelerator_ids: tuple[str, ...] = ()
    accelerator_identities: tuple[tuple[str, ...], ...] = ()
    robots: tuple[Robot, ...] = ()
    ip: str | None = None
    hostname: str | None = None
    python: str | None = None
    versions: tuple[tuple[str, str], ...] = ()


class NodeGroupInfo(NamedTuple):
    """A node group.

    Attributes:
        node_ranges: its nodes, as ascending ranges that neither overlap nor touch.
        unit: the unit of its resource ranks, or None while the accelerators of one of its nodes are unknown.
        segments: its units in rank order, as ranges of the cluster-wide numbers of that kind of unit.
        ignores_hardware: whether nodes are counted because hardware is ignored, not because there is none.
        declared: whether the file declares the accelerators of all of its nodes.
    """

    label: str
    node_ranges: tuple[range, ...]
    unit: Unit | None
    segments: tuple[range, ...]
    ignores_hardware: bool = False
    declared: bool = False

    @property
    def node_ranks(self) -> tuple[int, ...]:
        return tuple(rank for piece in self.node_ranges for rank in piece)

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.node_ranges))

    @property
    def num_units(self) -> int:
        """The number of resource ranks; 0 while `unit` is unknown."""
        return sum(map(len, self.segments))


class UnitNumbers:
    """The cluster-wide numbering of one kind of unit over the nodes."""

    def __init__(self, per_node: Iterable[int]) -> None:
        self._starts = list(accumulate(per_node, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def on(self, nodes: range) -> range:
        """Return the units on a range of nodes."""
        return range(self._starts[nodes.start], self._starts[nodes.stop])

    def on_node(self, node: int) -> range:
        return range(self._starts[node], self._starts[node + 1])

    def node_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def nodes_of(self, numbers: range) -> range:
        """Return the nodes that a range of units is on."""
        return range(self.node_of(numbers.start), self.node_of(numbers.stop - 1) + 1)


@dataclass(frozen=True, eq=False)
class ClusterTopology:
    """The nodes, by rank, and groups, by label, of a cluster. Make one with `from_config` or `from_nodes`.

    The reserved groups `cluster` and `node` come last.

    Attributes:
        probed: whether the nodes were probed.
        lost: the ranks of lost nodes, which elastic components do not use.
    """

    nodes: tuple[NodeInfo, ...]
    groups: Mapping[str, NodeGroupInfo]
    probed: bool = False
    lost: frozenset[int] = frozenset()

    @classmethod
    def from_config(cls, cluster: ClusterConfig, assume: Sequence[str] = ()) -> ClusterTopology:
        """Return the topology that a configuration describes, without spares and without connecting to a node.

        An assumption about a group overrides the group's declaration; one about every node does not.

        Raises:
            ConfigError: an assumption is invalid or names no group of the configuration.
        """
        active = cluster.num_active_nodes
        accelerators: dict[int, tuple[int, str | None]] = {}
        for group, count, model in accelerator_claims(cluster, assume):
            for piece in _ranges(group, active) if group else (range(active),):
                for rank in piece:
                    known_count, known_model = accelerators.get(rank, (count, model))
                    # Another group of the node may name the model.
                    accelerators[rank] = (known_count, known_model or (model if group else None))
        nodes = [_declared_node(rank, accelerators.get(rank)) for rank in range(active)]
        return cls._build(nodes, cluster)

    @classmethod
    def from_nodes(
        cls, nodes: Iterable[NodeInfo], cluster: ClusterConfig | None = None, *, lost: frozenset[int] = frozenset()
    ) -> ClusterTopology:
        """Return the topology of probed nodes, with the groups and robots of a configuration, if any.

        Args:
            nodes: all nodes, or all but the spares; spares are checked like the others and then left out.
            cluster: the configuration.
            lost: ranks of lost nodes; `nodes` describes their former state.

        Raises:
            PlacementError: the node ranks are not 0..N-1, or the number of nodes or their accelerators differ from
                the configuration.
        """
        by_rank = sorted(nodes, key=lambda node: node.rank)
        ranks = [node.rank for node in by_rank]
        if not by_rank or ranks != list(range(len(by_rank))):
            raise PlacementError(
                f"the nodes have ranks {format_ranks(ranks) or 'none'}, not 0 to {max(len(ranks) - 1, 0)} once each",
                help="set `RLINF_NODE_RANK` on every node before Ray starts there, or on none",
            )
        if cluster is not None:
            if len(by_rank) not in (cluster.num_active_nodes, cluster.num_nodes):
                raise PlacementError(
                    f"the configuration has {NODES.counted(cluster.num_nodes)}, the cluster {len(by_rank)}",
                    help="correct `cluster.num_nodes`, or start the missing nodes",
                )
            mismatches = accelerator_mismatches(cluster, by_rank)
            if mismatches:
                others = f" (and {len(mismatches) - 1} more nodes)" if len(mismatches) > 1 else ""
                raise PlacementError(
                    f"{mismatches[0]}{others}",
                    help=f"correct `accelerators` of group `{mismatches[0].label}`, or the node",
                )
            by_rank = by_rank[: cluster.num_active_nodes]
        return cls._build(by_rank, cluster, probed=True, lost=lost)

    @classmethod
    def _build(
        cls,
        nodes: list[NodeInfo],
        cluster: ClusterConfig | None,
        *,
        probed: bool = False,
        lost: frozenset[int] = frozenset(),
    ) -> ClusterTopology:
        groups = cluster.node_groups if cluster else ()
        for rank, robots in _robots_by_node(groups, len(nodes)).items():
            nodes[rank] = nodes[rank]._replace(robots=tuple(robots))
        topology = cls(tuple(nodes), {}, probed)
        everywhere = (range(len(nodes)),)
        infos = {group.label: topology._describe(group) for group in groups}
        declared = merge_ranges(piece for group in groups if group.accelerators for piece in _ranges(group, len(nodes)))
        infos[CLUSTER_LABEL] = topology._plain_group(CLUSTER_LABEL, everywhere, declared=declared == everywhere)
        infos[NODE_LABEL] = NodeGroupInfo(NODE_LABEL, everywhere, NODES, everywhere, ignores_hardware=True)
        return cls(topology.nodes, infos, probed, lost)

    def _describe(self, group: NodeGroup) -> NodeGroupInfo:
        ranges = _ranges(group, self.num_nodes)
        if group.hardware is not None:
            unit = Unit(UnitKind.ROBOT, group.hardware.type)
            return NodeGroupInfo(group.label, ranges, unit, self._segments(unit, ranges))
        if group.ignore_hardware:
            return NodeGroupInfo(group.label, ranges, NODES, ranges, ignores_hardware=True)
        return self._plain_group(group.label, ranges, declared=group.accelerators is not None)

    def _plain_group(self, label: str, ranges: tuple[range, ...], *, declared: bool) -> NodeGroupInfo:
        """Return a group that counts accelerators if any of its nodes has one, else nodes."""
        if any(len(self._unknown.on(piece)) for piece in ranges):
            return NodeGroupInfo(label, ranges, None, (), declared=declared)
        segments = self._segments(ACCELERATORS, ranges)
        if segments:
            return NodeGroupInfo(label, ranges, ACCELERATORS, segments, declared=declared)
        return NodeGroupInfo(label, ranges, NODES, ranges, declared=declared)

    def _segments(self, unit: Unit, ranges: tuple[range, ...]) -> tuple[range, ...]:
        numbers = self.numbers(unit)
        segments = (numbers.on(piece) for piece in ranges)
        return tuple(segment for segment in segments if segment)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"<ClusterTopology: {self.counts}>"

    @property
    def counts(self) -> str:
        """The numbers of nodes and, if known, accelerators, as in `2 nodes, 16 accelerators`."""
        known = self.num_accelerators
        nodes = NODES.counted(self.num_nodes)
        return nodes if known is None else f"{nodes}, {ACCELERATORS.counted(known)}"

    @cached_property
    def num_accelerators(self) -> int | None:
        """The number of accelerators in the cluster, or None while any node's accelerators are unknown."""
        return None if len(self._unknown) else len(self.numbers(ACCELERATORS))

    @cached_property
    def _unknown(self) -> UnitNumbers:
        """The numbering of the nodes whose accelerators are unknown."""
        return UnitNumbers(node.num_accelerators is None for node in self.nodes)

    @cached_property
    def _numbers(self) -> dict[Unit, UnitNumbers]:
        return {}

    def numbers(self, unit: Unit) -> UnitNumbers:
        """Return the numbering of one kind of unit over the cluster; unknown accelerators count as none."""
        numbers = self._numbers.get(unit)
        if numbers is None:
            numbers = self._numbers[unit] = UnitNumbers(units_on(node, unit) for node in self.nodes)
        return numbers

    def group(self, label: str) -> NodeGroupInfo:
        """Return the group of this label.

        Raises:
            PlacementError: the group does not exist.
        """
        info = self.groups.get(label)
        if info is None:
            raise PlacementError(
                f"node group `{label}` does not exist",
                help=did_you_mean(label, self.groups) or f"the groups are {quoted(self.groups)}",
            )
        return info


def units_on(node: NodeInfo, unit: Unit) -> int:
    """Return the number of units of a kind on a node; unknown accelerators count as none."""
    if unit.kind is UnitKind.NODE:
        return 1
    if unit.kind is UnitKind.ACCELERATOR:
        return node.num_accelerators or 0
    return sum(robot.type == unit.robot for robot in node.robots)


class AcceleratorMismatch(NamedTuple):
    """A node whose accelerators differ from its group's declaration."""

    node_rank: int
    label: str
    declared: str
    found: str

    def __str__(self) -> str:
        return f"node {self.node_rank}: group `{self.label}` declares {self.declared}, found {self.found}"


def accelerator_mismatches(cluster: ClusterConfig, nodes: Sequence[NodeInfo]) -> list[AcceleratorMismatch]:
    """Return every probed node (`nodes` by rank) whose accelerators differ from its groups' declarations.

    A model matches if the name found contains the declared one: `A800` matches `NVIDIA A800-SXM4-80GB`.
    """
    mismatches: list[AcceleratorMismatch] = []
    for group in cluster.node_groups:
        declared = group.accelerators
        if declared is None:
            continue
        for piece in _ranges(group, len(nodes)):
            for node in nodes[piece.start : piece.stop]:
                if node.num_accelerators != declared.per_node or not _same_model(declared.model, node):
                    want = _spell_accelerators(declared.per_node, declared.model)
                    have = _spell_accelerators(node.num_accelerators, node.accelerator_model)
                    mismatches.append(AcceleratorMismatch(node.rank, group.label, want, have))
    return mismatches


def _same_model(declared: str | None, node: NodeInfo) -> bool:
    if declared is None or node.accelerator_model is None or not node.num_accelerators:
        return True

    def fold(text: str) -> str:
        return "".join(filter(str.isalnum, text.casefold()))

    return fold(declared) in fold(node.accelerator_model)


def _spell_accelerators(count: int | None, model: str | None) -> str:
    if count is None:
        return "none that could be counted"
    if count == 0:
        return "no accelerator"
    return f"{count} x {model}" if model and count else ACCELERATORS.counted(count)


def _declared_node(rank: int, claim: tuple[int, str | None] | None) -> NodeInfo:
    if claim is None:
        return NodeInfo(rank)
    count, model = claim
    return NodeInfo(rank, count, accelerator_of_model(model).name if count else None, model if count else None)


def _robots_by_node(groups: Sequence[NodeGroup], num_nodes: int) -> dict[int, list[Robot]]:
    robots: dict[int, list[Robot]] = {}
    for group in groups:
        if group.hardware is not None:
            for config in group.hardware.configs:
                if config.node_rank < num_nodes:
                    robots.setdefault(config.node_rank, []).append(Robot(group.hardware.type, config))
    return robots


def _ranges(group: NodeGroup, num_nodes: int) -> tuple[range, ...]:
    """Return the group's nodes as ascending ranges, joined where they touch and cut off at the end of the cluster."""
    written = group.node_ranks.ranges
    if written is None:
        return (range(num_nodes),)
    return merge_ranges(range(piece.start, min(piece.stop, num_nodes)) for piece in written)
