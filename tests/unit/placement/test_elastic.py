"""Components that do without lost nodes: who can, which processes are left, and how they are numbered."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.errors import PlacementError
from rlinf_core.placement.component import ComponentPlacement, can_lack, needed_nodes, nodes_of_components
from rlinf_core.topology import ClusterTopology

SECTION: dict[str, Any] = {
    "num_nodes": 5,
    "node_groups": [
        {"label": "train", "node_ranks": "0-1", "accelerators": {"per_node": 2}},
        {"label": "sim", "node_ranks": "2-4", "accelerators": {"per_node": 0}},
    ],
    "component_placement": {
        "actor": {"node_group": "train", "placement": "0-3"},
        "env": {"node_group": "sim", "placement": "0-2:0-5", "elastic": True},
    },
}
CLUSTER = ClusterConfig.model_validate(SECTION)


def topology(*lost: int) -> ClusterTopology:
    nodes = ClusterTopology.from_config(CLUSTER).nodes
    return ClusterTopology.from_nodes(nodes, CLUSTER, lost=frozenset(lost))


def test_nodes_of_fixed_components_and_the_head_are_needed() -> None:
    assert nodes_of_components(CLUSTER) == {"actor": {0, 1}, "env": {2, 3, 4}}
    assert needed_nodes(CLUSTER) == {0, 1}


def test_job_can_lack_all_but_one_node_of_an_elastic_component() -> None:
    assert can_lack(CLUSTER, [3])
    assert can_lack(CLUSTER, [2, 4])
    assert not can_lack(CLUSTER, [2, 3, 4])
    assert not can_lack(CLUSTER, [1])
    assert not can_lack(CLUSTER, [0, 3])


def test_undeclared_accelerators_may_be_on_any_node() -> None:
    groups = [{"label": "sim", "node_ranks": "1-2"}]
    entry = {"node_group": "sim", "placement": "0", "elastic": True}
    section = {"num_nodes": 3, "node_groups": groups, "component_placement": {"env": entry}}
    assert nodes_of_components(ClusterConfig.model_validate(section)) == {"env": {1, 2}}


def test_processes_that_are_left_are_numbered_anew() -> None:
    whole = topology(3)
    left = ComponentPlacement(CLUSTER, whole).get_strategy("env").get_placement(whole)
    assert [(item.rank, item.cluster_node_rank, item.placement_node_rank, item.local_rank) for item in left] == [
        (0, 2, 0, 0),
        (1, 2, 0, 1),
        (2, 4, 1, 0),
        (3, 4, 1, 1),
    ]
    assert {(item.world_size, item.local_world_size) for item in left} == {(4, 2)}
    assert ComponentPlacement(CLUSTER, whole).get_world_size("env") == 4


def test_other_components_keep_their_processes_and_units() -> None:
    before, after = topology(), topology(2)
    actors = [ComponentPlacement(CLUSTER, item).get_strategy("actor").get_placement(item) for item in (before, after)]
    assert actors[0] == actors[1]


def test_as_many_processes_are_kept_as_the_work_divides_among() -> None:
    whole = topology(3)
    strategy = ComponentPlacement(CLUSTER, whole).get_strategy("env", lambda count: 18 % count == 0)
    assert len(strategy.get_placement(whole)) == 3
    none_fits = ComponentPlacement(CLUSTER, whole).get_strategy("env", lambda count: False)
    with pytest.raises(PlacementError, match="no process of component `env` is left"):
        none_fits.get_placement(whole)
