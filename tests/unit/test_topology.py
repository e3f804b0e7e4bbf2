"""Topologies from a configuration alone, from assumptions, and from probed nodes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.sections.hardware_rules import Assumption, parse_assumption
from rlinf_core.errors import ConfigError, PlacementError
from rlinf_core.topology import ACCELERATORS, NODES, ClusterTopology, NodeInfo, Unit, UnitKind, accelerator_mismatches


def cluster(num_nodes: int, *groups: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig.model_validate({"num_nodes": num_nodes, "node_groups": list(groups)})


def test_topology_is_shown_by_its_counts() -> None:
    assert repr(ClusterTopology.from_config(cluster(10_000))) == "<ClusterTopology: 10000 nodes>"
    probed = ClusterTopology.from_nodes([NodeInfo(0, 8, "NVIDIA")])
    assert repr(probed) == "<ClusterTopology: 1 node, 8 accelerators>"


FRANKA = {
    "label": "arms",
    "node_ranks": "1-2",
    "hardware": {
        "type": "Franka",
        "configs": [
            {"node_rank": 2, "robot_ip": "10.0.0.3"},
            {"node_rank": 1, "robot_ip": "10.0.0.1"},
            {"node_rank": 1, "robot_ip": "10.0.0.2"},
        ],
    },
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", Assumption(None, 8)),
        (" 0 ", Assumption(None, 0)),
        ("8xA800", Assumption(None, 8, "A800")),
        ("a800=8", Assumption("a800", 8)),
        ("4090=8xRTX 4090", Assumption("4090", 8, "RTX 4090")),
        ("a=b=2", Assumption("a=b", 2)),
        ("cluster=4", Assumption(None, 4)),
    ],
)
def test_assumptions_are_read(text: str, expected: Assumption) -> None:
    assert parse_assumption(text) == expected


@pytest.mark.parametrize("text", ["", "a800", "a800=", "=8", "8x", "-1", "a800=8.5", "a b=8", "a800:8"])
def test_what_is_no_assumption_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="does not give a number of accelerators") as caught:
        parse_assumption(text)
    assert "a800=8xA800" in (caught.value.help or "")


@pytest.mark.parametrize("text", ["1025", "a800=99999", "9" * 5000])
def test_no_more_is_assumed_than_can_be_declared(text: str) -> None:
    assert parse_assumption("01024").count == 1024
    with pytest.raises(ConfigError, match="at most 1024 accelerators"):
        parse_assumption(text)


def test_an_assumed_number_leaves_the_declared_model() -> None:
    group = {"label": "a", "node_ranks": 0, "accelerators": {"per_node": 8, "model": "Ascend 910B"}}
    nodes = ClusterTopology.from_config(cluster(1, group), ["a=4"]).nodes
    assert nodes == (NodeInfo(0, 4, "Ascend", "Ascend 910B"),)
    nodes = ClusterTopology.from_config(cluster(1, group), ["a=4xA800"]).nodes
    assert nodes == (NodeInfo(0, 4, "NVIDIA", "A800"),)


def test_accelerators_are_unknown_until_somebody_says() -> None:
    topology = ClusterTopology.from_config(cluster(2))
    assert [node.num_accelerators for node in topology.nodes] == [None, None]
    assert topology.num_accelerators is None
    assert topology.groups["cluster"].unit is None
    assert topology.groups["node"].unit == NODES


def test_what_is_declared_holds_for_the_nodes_of_the_group() -> None:
    group = {"label": "a", "node_ranks": "0-1", "accelerators": {"per_node": 8, "model": "Ascend 910B"}}
    topology = ClusterTopology.from_config(cluster(3, group))
    assert topology.nodes[1] == NodeInfo(1, 8, "Ascend", "Ascend 910B")
    assert topology.nodes[2] == NodeInfo(2)
    assert topology.group("a").num_units == 16
    assert topology.groups["cluster"].unit is None


def test_any_group_of_a_node_names_its_model() -> None:
    plain = {"label": "a", "node_ranks": "0-1", "accelerators": {"per_node": 8}}
    named = {"label": "b", "node_ranks": "1", "accelerators": {"per_node": 8, "model": "MI300X"}}
    for groups in ((plain, named), (named, plain)):
        nodes = ClusterTopology.from_config(cluster(2, *groups), ["4xH100"]).nodes
        assert [(node.num_accelerators, node.accelerator_type) for node in nodes] == [(8, "NVIDIA"), (8, "AMD")]


def test_group_assumption_wins_over_that_of_every_node() -> None:
    declared = {"label": "a", "node_ranks": 0, "accelerators": {"per_node": 8}}
    plain = {"label": "b", "node_ranks": 1}
    config = cluster(3, declared, plain)

    def counts(*assume: str) -> list[int | None]:
        return [node.num_accelerators for node in ClusterTopology.from_config(config, assume).nodes]

    assert counts("4") == [8, 4, 4]
    assert counts("a=2", "4") == [2, 4, 4]
    assert counts("b=1") == [8, 1, None]
    assert counts("b=1", "b=3") == [8, 3, None]


def test_an_assumption_about_no_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="node group `A800` does not exist") as caught:
        ClusterTopology.from_config(cluster(1, {"label": "a800", "node_ranks": 0}), ["A800=8"])
    assert caught.value.help == "did you mean `a800`?"


def test_a_group_counts_accelerators_if_any_of_its_nodes_has_one() -> None:
    nodes = [NodeInfo(0, 0), NodeInfo(1, 2, "NVIDIA"), NodeInfo(2, 0)]
    config = cluster(3, {"label": "a", "node_ranks": "0-1"}, {"label": "b", "node_ranks": "0,2"})
    topology = ClusterTopology.from_nodes(nodes, config)
    assert (topology.group("a").unit, topology.group("a").num_units) == (ACCELERATORS, 2)
    assert (topology.group("b").unit, topology.group("b").num_units) == (NODES, 2)
    assert (topology.group("cluster").unit, topology.group("cluster").num_units) == (ACCELERATORS, 2)
    assert (topology.group("node").unit, topology.group("node").num_units) == (NODES, 3)


def test_a_group_that_ignores_hardware_counts_nodes() -> None:
    group = {"label": "a", "node_ranks": "0-1", "ignore_hardware": True, "accelerators": {"per_node": 8}}
    info = ClusterTopology.from_config(cluster(2, group)).group("a")
    assert (info.unit, info.num_units, info.ignores_hardware) == (NODES, 2, True)


def test_robots_are_numbered_by_node_and_then_as_written() -> None:
    topology = ClusterTopology.from_config(cluster(3, FRANKA))
    info = topology.group("arms")
    assert (info.unit, info.num_units) == (Unit(UnitKind.ROBOT, "Franka"), 3)
    ips = [[getattr(robot.config, "robot_ip", None) for robot in node.robots] for node in topology.nodes]
    assert ips == [[], ["10.0.0.1", "10.0.0.2"], ["10.0.0.3"]]


def test_an_unknown_group_gets_the_nearest() -> None:
    with pytest.raises(PlacementError, match="node group `arm` does not exist") as caught:
        ClusterTopology.from_config(cluster(3, FRANKA)).group("arm")
    assert caught.value.help == "did you mean `arms`?"


def test_group_nodes_are_ranges_in_order_within_the_cluster() -> None:
    topology = ClusterTopology.from_config(cluster(6, {"label": "a", "node_ranks": ["4-9", 0, "1-2"]}))
    assert topology.group("a").node_ranges == (range(3), range(4, 6))
    assert topology.group("a").node_ranks == (0, 1, 2, 4, 5)


@pytest.mark.parametrize("ranks", [[], [1], [0, 0], [0, 2]])
def test_probed_nodes_must_be_ranks_from_0_once_each(ranks: list[int]) -> None:
    with pytest.raises(PlacementError, match="once each"):
        ClusterTopology.from_nodes(NodeInfo(rank, 0) for rank in ranks)


def test_probed_nodes_must_be_as_many_as_configured() -> None:
    with pytest.raises(PlacementError, match="the configuration has 2 nodes, the cluster 1"):
        ClusterTopology.from_nodes([NodeInfo(0, 0)], cluster(2))


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (NodeInfo(1, 4, "NVIDIA", "NVIDIA A800-SXM4-80GB"), "declares 8 x A800, found 4 x NVIDIA A800-SXM4-80GB"),
        (NodeInfo(1, 8, "NVIDIA", "NVIDIA H100"), "declares 8 x A800, found 8 x NVIDIA H100"),
        (NodeInfo(1, 0), "declares 8 x A800, found no accelerator"),
        (NodeInfo(1), "declares 8 x A800, found none that could be counted"),
    ],
)
def test_what_is_found_must_be_what_is_declared(actual: NodeInfo, message: str) -> None:
    config = cluster(2, {"label": "a", "node_ranks": "0-1", "accelerators": {"per_node": 8, "model": "A800"}})
    good = NodeInfo(0, 8, "NVIDIA", "NVIDIA A800-SXM4-80GB")
    assert accelerator_mismatches(config, [good, NodeInfo(1, 8, "NVIDIA", "a800 80GB")]) == []
    with pytest.raises(PlacementError) as caught:
        ClusterTopology.from_nodes([good, actual], config)
    assert caught.value.message == f"node 1: group `a` {message}"


def test_a_topology_travels() -> None:
    topology = ClusterTopology.from_config(cluster(3, FRANKA), ["2"])
    again = pickle.loads(pickle.dumps(topology))
    assert (again.nodes, again.groups) == (topology.nodes, topology.groups)
