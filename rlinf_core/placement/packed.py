"""Consecutive resources in equal shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlinf_core.config.ranks import format_range
from rlinf_core.errors import PlacementError
from rlinf_core.placement.placement import Placement
from rlinf_core.placement.strategy import (
    ClusterLike,
    PlacementStrategy,
    number,
    place,
    select_or_raise,
    split_labels,
    topology_of,
)
from rlinf_core.topology import ClusterTopology


class PackedPlacementStrategy(PlacementStrategy):
    """Process i takes the lowest unused resource rank s, and with it s+stride, s+2*stride, ...

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
            raise PlacementError(
                f"{self.start_hardware_rank} to {self.end_hardware_rank} is not a range of resource ranks",
                where=self._where,
                help="give the first and the last rank, counted from 0, both inclusive",
            )
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
    """Return one process per accelerator of the cluster, or per node if there are none.

    Raises:
        PlacementError: the accelerators of a node are unknown.
    """
    selection = select_or_raise(topology, (), "default placement")
    return PackedPlacementStrategy(0, selection.count - 1)
