"""Components that go on with fewer processes while nodes are lost: who can do without which node. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

from rlinf_core.config.machines.cluster import CLUSTER_LABEL, ClusterConfig
from rlinf_core.errors import PlacementError
from rlinf_core.placement.resolve import resolve
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology

Divides: TypeAlias = Callable[[int], bool]
"""Returns whether a component's work can be divided among a number of processes."""


def nodes_of_components(cluster: ClusterConfig) -> dict[str, frozenset[int]]:
    """Return the nodes of each component; all nodes of its groups where accelerators are not declared."""
    topology = ClusterTopology.from_config(cluster)
    used: dict[str, frozenset[int]] = {}
    for name, entry in cluster.component_placement.items():
        resolution = resolve(name, entry.rank_map, entry.node_group, topology)
        if resolution.selection is None or resolution.problems:
            labels = entry.node_group or (CLUSTER_LABEL,)
            groups = [topology.groups[label] for label in labels if label in topology.groups]
            used[name] = frozenset(rank for group in groups for rank in group.node_ranks)
        else:
            pieces = (nodes for block in resolution.blocks for _, nodes in resolution.selection.nodes(block.resources))
            used[name] = frozenset(rank for nodes in pieces for rank in nodes)
    return used


def needed_nodes(cluster: ClusterConfig) -> frozenset[int]:
    """Return the nodes of components that cannot go on without one of theirs, and the head."""
    used = nodes_of_components(cluster)
    fixed = (nodes for name, nodes in used.items() if not cluster.component_placement[name].elastic)
    return frozenset({0}).union(*fixed)


def can_lack(cluster: ClusterConfig, absent: Collection[int]) -> bool:
    """Return whether the job can go on without these nodes: each of its components keeps a process, and those that are
    not elastic keep all."""
    if not needed_nodes(cluster).isdisjoint(absent):
        return False
    used = nodes_of_components(cluster)
    return all(not nodes or not nodes <= set(absent) for nodes in used.values())


def without_nodes(
    component: str, placements: Sequence[Placement], absent: Collection[int], divides: Divides | None
) -> list[Placement]:
    """Return the placements of the processes that are left of an elastic component, renumbered.

    Args:
        component: its name, for the error.
        placements: those on all nodes, by rank.
        absent: the nodes that are lost.
        divides: whether its work can be divided among a number of processes: the most that do are kept.

    Raises:
        PlacementError: none is left.
    """
    left = [placement for placement in placements if placement.cluster_node_rank not in absent]
    while left and divides is not None and not divides(len(left)):
        left.pop()
    if not left:
        raise PlacementError(
            f"no process of component `{component}` is left: the nodes that it is placed on are lost",
            help="start them again by `rlinf up FILE`",
        )
    order = list(dict.fromkeys(placement.cluster_node_rank for placement in left))
    ranks: dict[int, list[int]] = {node: [] for node in order}
    for rank, placement in enumerate(left):
        ranks[placement.cluster_node_rank].append(rank)
    return [
        replace(
            placement,
            rank=rank,
            world_size=len(left),
            placement_node_rank=order.index(placement.cluster_node_rank),
            local_rank=ranks[placement.cluster_node_rank].index(rank),
            local_world_size=len(ranks[placement.cluster_node_rank]),
        )
        for rank, placement in enumerate(left)
    ]
