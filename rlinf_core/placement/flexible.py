"""Arbitrary resources for each process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlinf_core.arguments import short_repr
from rlinf_core.errors import PlacementError
from rlinf_core.placement.placement import Placement
from rlinf_core.placement.strategy import (
    ClusterLike,
    PlacementStrategy,
    items,
    numbers,
    place,
    select_or_raise,
    split_labels,
    topology_of,
)
from rlinf_core.topology import CLUSTER_LABEL


class FlexiblePlacementStrategy(PlacementStrategy):
    """Process i holds the resource ranks of list i, in the order given. Several processes may hold the same.

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
            raise PlacementError(
                f"`hardware_ranks_list` is {short_repr(hardware_ranks_list)}",
                where=self._where,
                help="give one list of ranks per process",
            )
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
                raise PlacementError(
                    f"process {rank} has no resource",
                    where=self._where,
                    help="use the group `node` for processes that need no hardware",
                )
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
