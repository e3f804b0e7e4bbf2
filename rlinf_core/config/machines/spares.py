"""Spare nodes of a file: which node each can replace, and which of them replaces whom. Pure."""

from __future__ import annotations

from collections.abc import Collection

from rlinf_core.config.machines.cluster import ClusterConfig


def groups_of(cluster: ClusterConfig, rank: int) -> frozenset[str]:
    """Return the labels of a node's groups."""
    return frozenset(group.label for group in cluster.node_groups if rank in group.node_ranks)


def has_robots(cluster: ClusterConfig, rank: int) -> bool:
    """Return whether a robot is attached to a node, or controlled from it."""
    units = (unit for group in cluster.node_groups if group.hardware for unit in group.hardware.configs)
    return any(
        rank == unit.node_rank or rank in (getattr(unit, field) for field in type(unit).node_ranks) for unit in units
    )


def can_replace(cluster: ClusterConfig, spare: int, rank: int) -> bool:
    """Return whether a spare can serve as node `rank`: one of the same groups, without robots, and not the head.

    The driver and Ray's control service end with the head. A robot is attached to its own node.
    """
    return (
        rank in range(1, cluster.num_active_nodes)
        and groups_of(cluster, spare) == groups_of(cluster, rank)
        and not has_robots(cluster, rank)
        and not has_robots(cluster, spare)
    )


def replaceable(cluster: ClusterConfig, spare: int) -> tuple[int, ...]:
    """Return the ranks of the nodes that a spare can serve as."""
    return tuple(rank for rank in range(cluster.num_active_nodes) if can_replace(cluster, spare, rank))


def choose_spares(
    cluster: ClusterConfig, lost: Collection[int], spares: Collection[int], needed: Collection[int] = ()
) -> dict[int, int]:
    """Return the spare that serves as each lost node; lost nodes without one are left out.

    Lower ranks come first on both sides: nodes of the same groups can be replaced by the same spares.

    Args:
        cluster: the nodes.
        lost: ranks of nodes that do not serve.
        spares: ranks of spares that can be used.
        needed: ranks of nodes that come before all others.
    """
    chosen: dict[int, int] = {}
    for rank in sorted(lost, key=lambda rank: (rank not in needed, rank)):
        free = (spare for spare in sorted(spares) if spare not in chosen.values())
        spare = next((spare for spare in free if can_replace(cluster, spare, rank)), None)
        if spare is not None:
            chosen[rank] = spare
    return chosen
