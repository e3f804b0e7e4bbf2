"""Small clusters to place things on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.topology import ClusterTopology


def _cluster(
    num_nodes: int, per_node: int | None = None, *, placement: dict[str, Any] | None = None, groups: Any = ()
) -> ClusterConfig:
    """Return `num_nodes` nodes; without `groups` one group `all` declares `per_node` accelerators on every node."""
    if not groups and per_node is not None:
        groups = [{"label": "everything", "node_ranks": "all", "accelerators": {"per_node": per_node}}]
    data = {"num_nodes": num_nodes, "node_groups": list(groups), "component_placement": placement or {}}
    return ClusterConfig.model_validate(data)


@pytest.fixture
def make_cluster() -> Callable[..., ClusterConfig]:
    return _cluster


@pytest.fixture
def place_one() -> Callable[..., list[Any]]:
    """The placements of one component of a cluster that has no other."""

    def place(cluster: ClusterConfig, isolate_accelerator: bool = True) -> list[Any]:
        topology = ClusterTopology.from_config(cluster)
        components = ComponentPlacement(cluster, topology)
        (name,) = components.components
        return components.get_strategy(name).get_placement(topology, isolate_accelerator)

    return place


@pytest.fixture
def two_kinds() -> list[dict[str, Any]]:
    """Node 0 is `a800`, node 1 is `4090`, 8 accelerators each."""
    return [
        {"label": "a800", "node_ranks": 0, "accelerators": {"per_node": 8, "model": "A800"}},
        {"label": "4090", "node_ranks": 1, "accelerators": {"per_node": 8}},
    ]
