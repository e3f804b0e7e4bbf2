"""Placement strategies for programs: packed, flexible, and by node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlinf_core.config.ranks import format_range, merge_ranges
from rlinf_core.errors import PlacementError
from rlinf_core.placement.strategy import (
    ClusterLike,
    Placement,
    PlacementStrategy,
    ProcessUnits,
    items,
    number,
    number_processes,
    numbers,
    place,
    select_or_raise,
    split_labels,
    topology_of,
)
from rlinf_core.suggest import quoted, short_repr
from rlinf_core.topology import CLUSTER_LABEL, NODE_LABEL, NODES, ClusterTopology, NodeGroupInfo


class PackedPlacementStrategy(PlacementStrategy):
    """A strategy in which process i takes the lowest unused resource rank s, and s+stride, s+2*stride, ...

    Args:
        start_hardware_rank, end_hardware_rank: the first and the last resource rank, local to the selected groups.
        num_hardware_per_process: the number of resources of each process.
        stride: the distance between two resources of a process.
        node_group: the group or groups of the resources (`"a"`, `"a,b"`, a list); None means `cluster`.

    Raises:
        PlacementError: the range is invalid, or the resources cannot be divided evenly.
    """

    def __init__(
        self,
        start_hardware_rank: int,
        end_hardware_rank: int,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: str | int | Sequence[str | int] | None = None,
    ) -> None:
        where = type(self).__name__
        self.start_hardware_rank = number(start_hardware_rank, "start_hardware_rank", where)
        self.end_hardware_rank = number(end_hardware_rank, "end_hardware_rank", where)
        self.num_hardware_per_process = number(num_hardware_per_process, "num_hardware_per_process", where)
        self.stride = number(stride, "stride", where)
        self.node_group_labels = split_labels(node_group)
        self._where = repr(self)
        self._check()

    def __repr__(self) -> str:
        group = f", node_group={','.join(self.node_group_labels)!r}" if self.node_group_labels else ""
        return (
            f"PackedPlacementStrategy({self.start_hardware_rank}, {self.end_hardware_rank}, "
            f"num_hardware_per_process={self.num_hardware_per_process}, stride={self.stride}{group})"
        )

    def _check(self) -> None:
        if not 0 <= self.start_hardware_rank <= self.end_hardware_rank:
            message = f"{self.start_hardware_rank} to {self.end_hardware_rank} is not a range of resource ranks"
            help = "give the first and the last rank, counted from 0, both inclusive"
            raise PlacementError(message, where=self._where, help=help)
        for name, value in (("num_hardware_per_process", self.num_hardware_per_process), ("stride", self.stride)):
            if value < 1:
                raise PlacementError(f"`{name}` is {value}", where=self._where, help="give a number >= 1")
        count = self.end_hardware_rank - self.start_hardware_rank + 1
        if count % self._block:
            fits = count // self._block * self._block
            what = f"shares of {self.num_hardware_per_process}"
            if self.stride > 1:
                what += f" with stride {self.stride}"
            resources = format_range(range(self.start_hardware_rank, self.end_hardware_rank + 1))
            raise PlacementError(
                f"{count} resource{'s' * (count != 1)}, {resources}, cannot be divided into {what}",
                where=self._where,
                help=f"their number must be a multiple of {self._block}"
                + (f"; did you mean {format_range(self._range(fits))}?" if fits else ""),
            )

    @property
    def _block(self) -> int:
        """The smallest number of resources that divides evenly."""
        return self.num_hardware_per_process * self.stride

    def _range(self, count: int) -> range:
        return range(self.start_hardware_rank, self.start_hardware_rank + count)

    def _processes(self) -> Iterator[range]:
        for base in range(self.start_hardware_rank, self.end_hardware_rank + 1, self._block):
            for offset in range(self.stride):
                yield range(base + offset, base + self._block, self.stride)

    def get_placement(self, cluster: ClusterLike, isolate_accelerator: bool = True) -> list[Placement]:
        selection = select_or_raise(topology_of(cluster), self.node_group_labels, self._where)
        return place(selection, self._processes(), isolate_accelerator, self._where)


def default_strategy(topology: ClusterTopology) -> PackedPlacementStrategy:
    """Return the strategy of one process per accelerator of the cluster, or per node if there are none.

    Raises:
        PlacementError: the accelerators of a node are unknown.
    """
    selection = select_or_raise(topology, (), "default placement")
    return PackedPlacementStrategy(0, selection.count - 1)


class FlexiblePlacementStrategy(PlacementStrategy):
    """A strategy in which process i holds the resource ranks of list i, in order. Processes may share resources.

    Args:
        hardware_ranks_list: one list of resource ranks for each process, local to the selected groups.
        node_group_label: the group or groups of the resources (`"a"`, `"a,b"`, a list); None means `cluster`.

    Raises:
        PlacementError: there are no processes, or one of them has no resources or an invalid rank.
    """

    def __init__(
        self,
        hardware_ranks_list: Iterable[Sequence[int]],
        node_group_label: str | int | Sequence[str | int] | None = None,
    ) -> None:
        self.node_group_labels = split_labels(node_group_label)
        self._where = "FlexiblePlacementStrategy"
        lists = items(hardware_ranks_list)
        if lists is None:
            message = f"`hardware_ranks_list` is {short_repr(hardware_ranks_list)}"
            raise PlacementError(message, where=self._where, help="give one list of ranks per process")
        self.hardware_ranks_list: tuple[Sequence[int], ...] = tuple(
            ranks if isinstance(ranks, range) else numbers(ranks, f"the resources of process {rank}", self._where)
            for rank, ranks in enumerate(lists)
        )
        if not self.hardware_ranks_list:
            raise PlacementError(
                "there is nothing to place", where=self._where, help="give one list of ranks per process"
            )
        for rank, resources in enumerate(self.hardware_ranks_list):
            if not resources:
                help = "use the group `node` for processes that need no hardware"
                raise PlacementError(f"process {rank} has no resource", where=self._where, help=help)
            if min(resources) < 0:
                raise PlacementError(
                    f"process {rank} has resource {min(resources)}", where=self._where, help="ranks start at 0"
                )

    def __repr__(self) -> str:
        groups = ",".join(self.node_group_labels) or CLUSTER_LABEL
        return f"FlexiblePlacementStrategy({len(self.hardware_ranks_list)} processes on {groups})"

    def get_placement(self, cluster: ClusterLike, isolate_accelerator: bool = True) -> list[Placement]:
        selection = select_or_raise(topology_of(cluster), self.node_group_labels, self._where)
        return place(selection, self.hardware_ranks_list, isolate_accelerator, self._where)


class NodePlacementStrategy(PlacementStrategy):
    """A strategy of one process for each entry of `node_ranks`, which may repeat. No process is assigned hardware.

    Args:
        node_ranks: the node of each process, by index in the selected groups; without a group, by rank in the cluster.
        node_group_label: the group or groups of the nodes (`"a"`, `"a,b"`, a list), indexed consecutively; None means
            `node`, every node.

    Raises:
        PlacementError: there are no processes, or their nodes are not integers.
    """

    def __init__(
        self,
        node_ranks: Iterable[int],
        node_group_label: str | int | Sequence[str | int] | None = None,
    ) -> None:
        self.node_ranks = numbers(node_ranks, "`node_ranks`", "NodePlacementStrategy")
        self.node_group_labels = split_labels(node_group_label) or (NODE_LABEL,)
        if not self.node_ranks:
            raise PlacementError(
                "there is nothing to place", where="NodePlacementStrategy", help="give one node per process"
            )

    def __repr__(self) -> str:
        groups = ",".join(self.node_group_labels)
        return f"NodePlacementStrategy({list(self.node_ranks)}, node_group_label={groups!r})"

    def get_placement(self, cluster: ClusterLike, isolate_accelerator: bool = True) -> list[Placement]:
        topology = topology_of(cluster)
        groups = [topology.group(label) for label in self.node_group_labels]
        _check_apart(groups)
        nodes = [(node, group.label) for group in groups for node in group.node_ranks]
        held: list[ProcessUnits] = []
        for rank, index in enumerate(self.node_ranks):
            if not 0 <= index < len(nodes):
                have = f"{quoted(self.node_group_labels)} {'have' if len(groups) > 1 else 'has'}"
                message = f"process {rank} asks for node {index}, but {have} nodes {format_range(range(len(nodes)))}"
                of_groups = self.node_group_labels != (NODE_LABEL,)
                help = "ranks count the nodes of the groups, from 0" if of_groups else None
                raise PlacementError(message, where="NodePlacementStrategy", help=help)
            held.append((*nodes[index], ()))
        return number_processes(topology, NODES, held, isolate_accelerator)


def _check_apart(groups: Sequence[NodeGroupInfo]) -> None:
    """Raise a PlacementError if a node is in two of the groups."""
    ranges = [piece for group in groups for piece in group.node_ranges]
    if sum(map(len, merge_ranges(ranges))) < sum(map(len, ranges)):
        message = f"the node groups {quoted(group.label for group in groups)} share nodes"
        help = "remove one of them: a node's environment depends on the group that selects it"
        raise PlacementError(message, where="NodePlacementStrategy", help=help)
