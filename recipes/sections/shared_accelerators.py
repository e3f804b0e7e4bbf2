"""Components on the same accelerators."""

from __future__ import annotations

from typing import Any


def share_accelerators(config: Any, one: str, other: str) -> bool:
    """Return whether two placed components have a declared accelerator in common."""
    cluster = config.cluster
    nodes = cluster.num_nodes
    declared = {
        group.label: tuple(group.node_ranks.resolve(nodes))
        for group in cluster.node_groups or ()
        if group.accelerators is not None
    }
    if declared:
        # A component without a node group may use the accelerators of all nodes.
        declared.setdefault("cluster", tuple(range(nodes)))
    # Compared by nodes, since several labels may name the same nodes with other interpreters. None: all accelerators.
    used: list[list[tuple[tuple[int, ...], range | None]]] = []
    for name in (one, other):
        entry = cluster.component_placement[name]
        groups = [declared[label] for label in entry.node_group or ("cluster",) if label in declared]
        used.append([(ranks, part.resources) for ranks in groups for part in entry.placement.parts])
    return any(
        ranks == others and (mine is None or theirs is None or not set(mine).isdisjoint(theirs))
        for ranks, mine in used[0]
        for others, theirs in used[1]
    )
