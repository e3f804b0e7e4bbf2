"""Spare nodes in a file: counted among all, placed on by nobody, refused where they can replace none."""

from __future__ import annotations

import pytest

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.topology import ClusterTopology
from tests.unit.config.cluster_findings import faults_of

FRANKA = "hardware: {type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.9}]}"


def file(*groups: str, num_nodes: int = 3, spare_nodes: int = 1) -> str:
    lines = ["cluster:", f"  num_nodes: {num_nodes}", f"  spare_nodes: {spare_nodes}", "  node_groups:"]
    return "\n".join([*lines, *(f"    - {{{group}}}" for group in groups), ""])


def test_no_process_is_placed_on_a_spare() -> None:
    section = {
        "num_nodes": 4,
        "spare_nodes": 1,
        "node_groups": [{"label": "sim", "node_ranks": "1-3", "accelerators": {"per_node": 2}}],
        "component_placement": {
            "env": {"node_group": "sim", "placement": "all"},
            "agent": {"node_group": "node", "placement": "all"},
        },
    }
    cluster = ClusterConfig.model_validate(section)
    topology = ClusterTopology.from_config(cluster, ["0"])
    placement = ComponentPlacement(cluster, topology)
    assert (topology.num_nodes, cluster.spare_ranks) == (3, range(3, 4))
    nodes = [item.cluster_node_rank for item in placement.get_strategy("env").get_placement(topology)]
    assert nodes == [1, 1, 2, 2]
    assert placement.get_world_size("agent") == 3


def test_topology_leaves_probed_spares_out() -> None:
    cluster = ClusterConfig.model_validate({"num_nodes": 3, "spare_nodes": 1})
    nodes = ClusterTopology.from_config(ClusterConfig.model_validate({"num_nodes": 3}), ["0"]).nodes
    assert ClusterTopology.from_nodes(nodes, cluster).num_nodes == 2
    assert ClusterTopology.from_nodes(nodes[:2], cluster).num_nodes == 2


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        (file("label: sim, node_ranks: 1-2"), []),
        (file("label: train, node_ranks: 0", num_nodes=3), []),
        (file("label: sim, node_ranks: 1"), [("spare-cannot-serve", 3, "1")]),
        (file("label: all, node_ranks: all", num_nodes=2), [("spare-cannot-serve", 3, "1")]),
        (file(f"label: arm, node_ranks: 1-2, {FRANKA}"), [("spare-cannot-serve", 3, "1")]),
        (file("label: sim, node_ranks: 1-2", spare_nodes=3), [("spare-nodes-count", 3, "3")]),
        (file("label: sim, node_ranks: 1-9"), [("node-rank-out-of-range", 5, "1-9")]),
    ],
    ids=["same-group", "no-group", "other-group", "head-only", "robot", "all-spares", "out-of-range"],
)
def test_spare_must_fit_a_node(text: str, findings: list[tuple[str, int, str]]) -> None:
    assert faults_of(text) == findings
