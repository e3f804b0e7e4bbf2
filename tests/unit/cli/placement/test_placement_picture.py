"""Who shares what: the units of hardware, the processes on them, and how the picture groups nodes."""

from __future__ import annotations

from rlinf_cli.placement.picture import UnitUse, labels_of, unit_uses
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.topology import ClusterTopology
from tests.unit.test_topology import FRANKA, cluster

CLUSTER = ClusterConfig.model_validate(
    {
        "num_nodes": 3,
        "node_groups": [{"label": "a", "node_ranks": "all", "accelerators": {"per_node": 2}}],
        "component_placement": {
            "actor": {"node_group": "a", "placement": "0-3"},
            "env": {"node_group": "a", "placement": "1-2"},
            "agent": {"node_group": "node", "placement": "2:0-1"},
        },
    }
)


def test_every_unit_is_listed_with_its_users() -> None:
    topology = ClusterTopology.from_config(CLUSTER)
    components = ComponentPlacement(CLUSTER, topology)
    placements = {name: components.get_strategy(name).get_placement(topology) for name in components.components}
    uses = unit_uses(topology, placements)
    assert uses == [
        UnitUse(0, "NVIDIA", 0, (("actor", 0),)),
        UnitUse(0, "NVIDIA", 1, (("actor", 1), ("env", 0))),
        UnitUse(1, "NVIDIA", 0, (("actor", 2), ("env", 1))),
        UnitUse(1, "NVIDIA", 1, (("actor", 3),)),
        UnitUse(2, "NVIDIA", 0, ()),
        UnitUse(2, "NVIDIA", 1, ()),
        UnitUse(2, "node", 0, (("agent", 0), ("agent", 1))),
    ]


def test_robots_and_bare_nodes_are_units_too() -> None:
    arms = {"type": "Franka", "configs": [{"robot_ip": f"10.0.0.{node}", "node_rank": node} for node in (1, 2)]}
    with_arms = {"num_nodes": 3, "node_groups": [{"label": "arms", "node_ranks": "1-2", "hardware": arms}]}
    topology = ClusterTopology.from_config(ClusterConfig.model_validate(with_arms))
    robots = [use for use in unit_uses(topology, {}) if use.hardware_type == "Franka"]
    assert robots == [UnitUse(node, "Franka", 0, ()) for node in (1, 2)]
    groups = [{"label": "bare", "node_ranks": "all", "accelerators": {"per_node": 0}}]
    bare = ClusterTopology.from_config(ClusterConfig.model_validate({"num_nodes": 2, "node_groups": groups}))
    assert [(use.node_rank, use.hardware_type) for use in unit_uses(bare, {})] == [(0, "node"), (1, "node")]


def test_labels_of_a_node_are_the_users_own() -> None:
    topology = ClusterTopology.from_config(cluster(3, FRANKA, {"label": "second", "node_ranks": "2"}))
    assert [labels_of(topology, rank) for rank in range(3)] == [(), ("arms",), ("arms", "second")]
