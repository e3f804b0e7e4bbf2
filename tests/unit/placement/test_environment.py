"""The environment of a process: that of the group which placed it, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.errors import ConfigError
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.environment import ProcessEnvironment, process_environment, ray_interpreter
from rlinf_core.placement.strategies import FlexiblePlacementStrategy
from rlinf_core.topology import ClusterTopology

Places = Callable[..., list[ProcessEnvironment]]


def cluster_of(groups: list[dict[str, Any]], num_nodes: int = 1, **extra: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"num_nodes": num_nodes, "node_groups": groups, **extra})


def group(label: str, node_ranks: Any = "all", **options: Any) -> dict[str, Any]:
    """Return a group of four accelerators a node whose `env_configs` give this to all of its nodes."""
    configs = [{"node_ranks": "all", **options}] if options else []
    return {"label": label, "node_ranks": node_ranks, "accelerators": {"per_node": 4}, "env_configs": configs}


def names(cluster: ClusterConfig, node: int, label: str) -> list[str]:
    return [variable.name for variable in process_environment(cluster, node, label).variables]


def test_cluster_placed_process_gets_no_variables_of_a_group() -> None:
    rollout = group("rollout", env_vars={"OMP_NUM_THREADS": "4"}, python_interpreter_path="/opt/rollout/bin/python")
    placement = {"env": "0-1", "rollout": {"node_group": "rollout", "placement": "2-3"}}
    cluster = cluster_of([rollout], component_placement=placement)
    topology = ClusterTopology.from_config(cluster)
    components = ComponentPlacement(cluster, topology)
    values = {
        name: {
            process_environment(cluster, item.cluster_node_rank, item.node_group_label)
            for item in components.get_strategy(name).get_placement(topology)
        }
        for name in components.components
    }
    assert values["env"] == {ProcessEnvironment()}
    (of_rollout,) = values["rollout"]
    assert [(variable.name, variable.value) for variable in of_rollout.variables] == [("OMP_NUM_THREADS", "4")]
    assert of_rollout.interpreter == "/opt/rollout/bin/python"
    assert of_rollout.interpreter_group == "rollout"


def test_two_groups_of_a_node_have_their_own_interpreters() -> None:
    cluster = cluster_of(
        [
            group("a", env_vars={"A": "1"}, python_interpreter_path="/opt/a/bin/python"),
            group("b", env_vars={"A": "2"}, python_interpreter_path="/opt/b/bin/python"),
        ]
    )
    results = [process_environment(cluster, 0, label) for label in ("a", "b", "cluster", "node")]
    assert [result.interpreter for result in results] == ["/opt/a/bin/python", "/opt/b/bin/python", None, None]
    assert [result.values({}) for result in results] == [{"A": "1"}, {"A": "2"}, {}, {}]


def test_process_of_several_groups_gets_those_of_its_unit() -> None:
    cluster = cluster_of([group("a", 0, env_vars={"A": "1"}), group("b", 1, env_vars={"B": "1"})], 2)
    topology = ClusterTopology.from_config(cluster)
    placements = FlexiblePlacementStrategy([[0], [4], [7]], ["b", "a"]).get_placement(topology)
    assert [names(cluster, placement.cluster_node_rank, placement.node_group_label) for placement in placements] == [
        ["B"],
        ["A"],
        ["A"],
    ]


def test_all_in_an_entry_is_its_group_and_no_more() -> None:
    cluster = cluster_of([group("a", 1, env_vars={"A": "1"})], 2)
    assert [names(cluster, rank, "a") for rank in range(2)] == [[], ["A"]]


def test_a_default_interpreter_is_for_whoever_has_no_other() -> None:
    a = group("a", python_interpreter_path="/opt/a/bin/python")
    cluster = cluster_of([a, group("b", env_vars={"B": "1"})], python_interpreter_path="/opt/bin/python")
    diagnostics = {label: process_environment(cluster, 0, label) for label in ("a", "b", "node")}
    assert {label: diagnostic.interpreter for label, diagnostic in diagnostics.items()} == {
        "a": "/opt/a/bin/python",
        "b": "/opt/bin/python",
        "node": "/opt/bin/python",
    }
    assert diagnostics["b"].variables


@pytest.mark.parametrize(
    ("interpreters", "default", "expected"),
    [
        ((None, None), None, None),
        (("/a", None), None, "/a"),
        (("/a", "/b"), None, None),
        (("/a", "/a"), None, "/a"),
        (("/a", "/b"), "/c", "/c"),
        (("/a", None), "/c", "/a"),
        ((None, None), "/c", "/c"),
    ],
)
def test_ray_runs_with_the_interpreter_of_a_nodes_groups(
    interpreters: tuple[str | None, ...], default: str | None, expected: str | None
) -> None:
    groups = [
        group(label, python_interpreter_path=path) if path else group(label)
        for label, path in zip("ab", interpreters, strict=True)
    ]
    assert ray_interpreter(cluster_of(groups, python_interpreter_path=default), 0) == expected


def test_forwarded_variables_rank_below_those_of_the_group() -> None:
    cluster = cluster_of([group("a", env_vars={"A": "of the group"})], forward_env=["A", "B"])
    environ = {"A": "of the driver", "B": "$HOME costs 5$", "C": "3"}
    assert process_environment(cluster, 0, "node").values(environ) == {"A": "of the driver", "B": "$HOME costs 5$"}
    assert process_environment(cluster, 0, "a").values(environ) == {"A": "of the group", "B": "$HOME costs 5$"}
    with pytest.raises(ConfigError, match="names `A`, `B`, which are not set here"):
        process_environment(cluster, 0, "a").values({})
