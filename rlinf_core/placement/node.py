"""Processes on nodes, whatever the nodes hold."""

from __future__ import annotations

from collections.abc import Iterable

from rlinf_core.config.ranks import format_range
from rlinf_core.errors import PlacementError
from rlinf_core.placement.placement import Placement
from rlinf_core.placement.strategy import ClusterLike, Held, PlacementStrategy, count_up, numbers, topology_of
from rlinf_core.topology import NODE_LABEL, NODES


class NodePlacementStrategy(PlacementStrategy):
    """One process for each entry of `node_ranks`; an entry may repeat. No process is assigned hardware.

    Args:
        node_ranks: the node of each process, by its index in the selected group; without a group that is the node's
            rank in the cluster.
        node_group_label: the group whose nodes are meant; None means `node`, every node.

    Raises:
        PlacementError: there are no processes, or their nodes are no whole numbers.
    """

    def __init__(self, node_ranks: Iterable[int], node_group_label: str | int | None = None) -> None:
        self.node_ranks = numbers(node_ranks, "`node_ranks`", "NodePlacementStrategy")
        self.node_group_label = NODE_LABEL if node_group_label is None else str(node_group_label)
        if not self.node_ranks:
            raise PlacementError(
                "there is nothing to place", where="NodePlacementStrategy", help="give a node a process"
            )

    def __repr__(self) -> str:
        return f"NodePlacementStrategy({list(self.node_ranks)}, node_group_label={self.node_group_label!r})"

    def get_placement(self, cluster: ClusterLike, isolate_accelerator: bool = True) -> list[Placement]:
        topology = topology_of(cluster)
        group = topology.group(self.node_group_label)
        nodes = group.node_ranks
        held: list[Held] = []
        for rank, index in enumerate(self.node_ranks):
            if not 0 <= index < len(nodes):
                exist = format_range(range(len(nodes)))
                raise PlacementError(
                    f"process {rank} asks for node {index}, but `{group.label}` has nodes {exist}",
                    where="NodePlacementStrategy",
                    help="ranks count the nodes of the group, from 0" if group.label != NODE_LABEL else None,
                )
            held.append((nodes[index], group.label, ()))
        return count_up(topology, NODES, held, isolate_accelerator)
