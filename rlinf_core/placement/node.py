"""Processes on nodes, regardless of hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlinf_core.config.ranks import format_range, merge_ranges
from rlinf_core.errors import PlacementError
from rlinf_core.placement.placement import Placement
from rlinf_core.placement.strategy import (
    ClusterLike,
    PlacementStrategy,
    ProcessUnits,
    number_processes,
    numbers,
    split_labels,
    topology_of,
)
from rlinf_core.suggest import quoted
from rlinf_core.topology import NODE_LABEL, NODES, NodeGroupInfo


class NodePlacementStrategy(PlacementStrategy):
    """One process for each entry of `node_ranks`; an entry may repeat. No process is assigned hardware.

    Args:
        node_ranks: the node of each process, by its index in the selected groups; without a group its rank in the
            cluster.
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
                raise PlacementError(
                    f"process {rank} asks for node {index}, but {have} nodes {format_range(range(len(nodes)))}",
                    where="NodePlacementStrategy",
                    help=None
                    if self.node_group_labels == (NODE_LABEL,)
                    else "ranks count the nodes of the groups, from 0",
                )
            held.append((*nodes[index], ()))
        return number_processes(topology, NODES, held, isolate_accelerator)


def _check_apart(groups: Sequence[NodeGroupInfo]) -> None:
    """Raise a PlacementError if a node is in two of the groups."""
    ranges = [piece for group in groups for piece in group.node_ranges]
    if sum(map(len, merge_ranges(ranges))) < sum(map(len, ranges)):
        raise PlacementError(
            f"the node groups {quoted(group.label for group in groups)} share nodes",
            where="NodePlacementStrategy",
            help="remove one of them: a node's environment depends on the group that selects it",
        )
