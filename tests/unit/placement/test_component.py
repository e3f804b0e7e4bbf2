"""Where a component's processes go, what they are told of it, and what is left without a node."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import ConfigError, PlacementError
from rlinf_core.node.environment import ProcessEnvironment, process_environment, ray_interpreter
from rlinf_core.placement.component import (
    ComponentPlacement,
    HybridComponentPlacement,
    PlacementMode,
    can_lack,
    needed_nodes,
    nodes_of_components,
)
from rlinf_core.placement.strategies import FlexiblePlacementStrategy
from rlinf_core.topology import ClusterTopology, NodeInfo

Make = Callable[..., ClusterConfig]
ONE_BY_EIGHT = ClusterTopology.from_nodes([NodeInfo(0, 8, "NVIDIA")])
TWO_BY_EIGHT = ClusterTopology.from_nodes([NodeInfo(0, 8, "NVIDIA"), NodeInfo(1, 8, "NVIDIA")])
CPU = ClusterTopology.from_nodes([NodeInfo(0, 0), NodeInfo(1, 0)])


def of(topology: ClusterTopology, **placement: Any) -> ComponentPlacement:
    return ComponentPlacement({"cluster": {"component_placement": placement}}, topology)


def test_every_form_of_configuration_means_the_same(make_cluster: Make) -> None:
    cluster = make_cluster(1, 8, placement={"actor,rollout": "0-3", "env": 5})
    forms: list[Any] = [
        cluster,
        SimpleNamespace(cluster=cluster),
        {"cluster": cluster},
        {"cluster": {"component_placement": {"actor, rollout": "0-3", "env": 5}}},
        SimpleNamespace(cluster=SimpleNamespace(component_placement={"actor,rollout": ["0-1", "2-3"], "env": "5"})),
    ]
    for form in forms:
        components = ComponentPlacement(form, ONE_BY_EIGHT)
        ranks = {name: components.get_hardware_ranks(name) for name in components.components}
        assert ranks == {"actor": [0, 1, 2, 3], "rollout": [0, 1, 2, 3], "env": [5]}


def test_placement_is_shown_by_its_world_sizes() -> None:
    components = of(ONE_BY_EIGHT, actor="0-3", rollout="0-3", env=5)
    assert repr(components) == "<ComponentPlacement: actor 4, rollout 4, env 1, hybrid>"


@pytest.mark.parametrize(
    ("form", "help"),
    [
        ({"cluster": {}}, "add `cluster.component_placement`"),
        (SimpleNamespace(cluster=None), "add `cluster.component_placement`"),
        (None, "of a file without `recipe`, pass the job's `cluster`"),
    ],
)
def test_a_configuration_that_places_nothing_is_refused(form: Any, help: str) -> None:
    with pytest.raises(PlacementError, match="does not place any component") as caught:
        ComponentPlacement(form, ONE_BY_EIGHT)
    assert caught.value.help == help


def test_an_unknown_component_gets_the_nearest() -> None:
    components = of(ONE_BY_EIGHT, actor="0-3")
    for ask in (components.get_strategy, components.get_world_size, components.get_hardware_ranks):
        with pytest.raises(PlacementError, match="component `acter` is not placed") as caught:
            ask("acter")
        assert caught.value.help == "did you mean `actor`?"
    with pytest.raises(PlacementError, match="component `None` is not placed"):
        components.get_world_size(None)  # pyright: ignore[reportArgumentType]
    for placed, help in ((components, "the components are `actor`"), (of(ONE_BY_EIGHT), "no component is placed")):
        with pytest.raises(PlacementError, match="`simulator` is not placed") as caught:
            placed.get_strategy("simulator")
        assert caught.value.help == help


@pytest.mark.parametrize(
    ("topology", "placement", "message", "part", "help"),
    [
        (ONE_BY_EIGHT, "4-8", "asks for resource 8, but `cluster` has resources 0-7", None, "did you mean 4-7?"),
        (ONE_BY_EIGHT, "0-3,3", "lists resource 3 of `cluster` twice", "3", "after a colon"),
        (ONE_BY_EIGHT, "5,0-3", "lists resources 0-3 after 5", "0-3", "did you mean `0-3,5`?"),
        (ONE_BY_EIGHT, "0-7:0-2", "puts 3 processes on 8 resources", None, "`0-7:0-3`"),
        (ONE_BY_EIGHT, "0:0,1:2", "skips process rank 1", "1:2", "did you mean `1:1`?"),
        (ONE_BY_EIGHT, "0:1", "starts its process ranks at 1", None, "did you mean `0:0`?"),
        (TWO_BY_EIGHT, "6-9:0", "resources 6-9 of `cluster`, which are on nodes 0 and 1", None, "2 nodes x 8"),
        (CPU, "0-1:0", "resources 0-1 of `cluster`, which are on nodes 0 and 1", None, "one process per node"),
    ],
)
def test_a_map_that_cannot_be_laid_out_is_refused(
    topology: ClusterTopology, placement: str, message: str, part: str | None, help: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        of(topology, actor=placement)
    error = caught.value
    assert message in error.message
    assert "component `actor`" in error.message
    assert error.where == f"cluster.component_placement.actor, map `{placement}`" + (f", part `{part}`" if part else "")
    assert help in (error.help or "")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("0-7:all", "`all` cannot be used for process ranks"),
        ("", "a rank or a range is missing here"),
        ("0-1:0-1，2", "ranks cannot contain `，`"),
        ("0–7", "ranks cannot contain `–`"),
        ([], "the list is empty"),
        ({"placement": "0", "node_groups": "node"}, r"unknown key `node_groups`(.|\n)*did you mean `node_group`\?"),
        ({"placement": "0", "gpus": 1}, r"unknown key `gpus`(.|\n)*known: .*`placement`"),
        ({"node_group": "node"}, "`placement` is missing"),
        ({"placement": "0", "node_group": "no de"}, "a name cannot contain"),
        ({"placement": "0", "node_group": "a，b"}, "a name cannot contain `，`"),
        (b"0", "found bytes"),
        (np.array([0, 1]), "found ndarray"),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message) as caught:
        of(ONE_BY_EIGHT, actor=entry)
    assert (caught.value.where or "").startswith("cluster.component_placement.actor")


def test_a_component_twice_is_refused() -> None:
    with pytest.raises(PlacementError, match="component `rollout` is placed twice"):
        ComponentPlacement({"cluster": {"component_placement": {"actor,rollout": "0", "rollout": "1"}}}, ONE_BY_EIGHT)


def test_an_unknown_group_is_refused(make_cluster: Make, two_kinds: Any) -> None:
    cluster = make_cluster(2, groups=two_kinds, placement={"actor": {"node_group": "A800", "placement": "0"}})
    with pytest.raises(PlacementError, match="node group `A800`, which does not exist") as caught:
        ComponentPlacement(cluster, ClusterTopology.from_config(cluster))
    assert caught.value.help == "did you mean `a800`?"
    cluster = make_cluster(2, groups=two_kinds, placement={"actor": {"node_group": "a800", "placement": "0"}})
    with pytest.raises(PlacementError, match="`a800`, without which the cluster was made") as caught:
        ComponentPlacement(cluster, TWO_BY_EIGHT)
    assert caught.value.help == "make it with the configuration: `Cluster(cluster_cfg=cfg)`"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("a800,a800", "lists node group `a800` twice"),
        ("a800,both", "selects `a800` and `both`, which share node 0"),
        ("both,cluster", "selects `both` and `cluster`, which share nodes 0-1"),
        ("a800,node", "`a800` counts accelerators, `node` counts nodes"),
        ("cpu,node", "selects `cpu` and `node`, which share node 2"),
        ("arms,a800", "`arms` counts Franka units, `a800` counts accelerators"),
        ("bare", "node group `bare`, which has no Franka units"),
    ],
)
def test_groups_that_do_not_go_together_are_refused(
    make_cluster: Make, two_kinds: Any, labels: str, message: str
) -> None:
    groups = [
        *two_kinds,
        {"label": "both", "node_ranks": "0-1"},
        {"label": "cpu", "node_ranks": 2, "accelerators": {"per_node": 0}},
        {
            "label": "arms",
            "node_ranks": 2,
            "hardware": {"type": "Franka", "configs": [{"node_rank": 2, "robot_ip": "10.0.0.1"}]},
        },
        {"label": "bare", "node_ranks": 1, "hardware": {"type": "Franka", "configs": []}},
    ]
    cluster = make_cluster(3, groups=groups, placement={"actor": {"node_group": labels, "placement": "all"}})
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(cluster, ClusterTopology.from_config(cluster))
    assert message in caught.value.message


def test_equal_groups_may_share_a_node_without_units(make_cluster: Make) -> None:
    unit = {"node_rank": 0, "robot_ip": "10.0.0.1"}
    groups = [
        {"label": "a", "node_ranks": "0-1", "hardware": {"type": "Franka", "configs": [unit]}},
        {"label": "b", "node_ranks": 2, "hardware": {"type": "Franka", "configs": [{**unit, "node_rank": 2}]}},
    ]
    cluster = make_cluster(3, groups=groups, placement={"env": {"node_group": "b,a", "placement": "all"}})
    topology = ClusterTopology.from_config(cluster)
    placements = ComponentPlacement(cluster, topology).get_strategy("env").get_placement(topology)
    assert [placement.cluster_node_rank for placement in placements] == [2, 0]


def test_unknown_accelerators_are_refused_at_run_time() -> None:
    with pytest.raises(PlacementError, match="the accelerators of `cluster` are unknown"):
        of(ClusterTopology.from_nodes([NodeInfo(0)]), actor="0")


NODE = {"node_group": "node", "placement": "0-1:0-9"}


@pytest.mark.parametrize(
    ("topology", "placement", "mode"),
    [
        (TWO_BY_EIGHT, {"actor": "0-15"}, PlacementMode.COLLOCATED),
        (TWO_BY_EIGHT, {"actor": "0-15", "rollout": "all", "env": "0-15:0-7"}, PlacementMode.COLLOCATED),
        (TWO_BY_EIGHT, {"actor": "0-7", "rollout": "8-15"}, PlacementMode.DISAGGREGATED),
        (TWO_BY_EIGHT, {"actor": "0-7", "rollout": "8-15", "agent": NODE}, PlacementMode.DISAGGREGATED),
        (TWO_BY_EIGHT, {"actor": "0-15", "agent": NODE}, PlacementMode.COLLOCATED),
        (TWO_BY_EIGHT, {"actor": "0-15", "rollout": "8-15"}, PlacementMode.HYBRID),
        (TWO_BY_EIGHT, {"actor": "0-7", "rollout": "0-7", "env": "8-15"}, PlacementMode.HYBRID),
        (TWO_BY_EIGHT, {"actor": "0-8", "rollout": "8-15"}, PlacementMode.HYBRID),
        (CPU, {"actor": 0, "rollout": 1}, PlacementMode.DISAGGREGATED),
        (CPU, {"actor,rollout": "all"}, PlacementMode.COLLOCATED),
        (CPU, {"agent": NODE}, PlacementMode.COLLOCATED),
    ],
)
def test_the_mode_is_how_hardware_is_shared(
    topology: ClusterTopology, placement: dict[str, Any], mode: PlacementMode
) -> None:
    assert HybridComponentPlacement({"cluster": {"component_placement": placement}}, topology).placement_mode is mode


def test_a_job_that_would_compute_on_the_cpu_unasked_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = {"cluster": {"component_placement": {"actor,rollout": "0", "env": {"node_group": "node", "placement": 0}}}}
    without, with_one = (SimpleNamespace(topology=ClusterTopology.from_nodes([NodeInfo(0, n)])) for n in (0, 1))
    ComponentPlacement(config, without)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("NO ACCELERATOR FOUND: `actor`, `rollout` are placed by accelerator rank")
    caplog.clear()
    ComponentPlacement(config, with_one)
    assert not caplog.records
    with pytest.raises(PlacementError, match="no accelerator found, so ranks count nodes"):
        ComponentPlacement(
            {"cluster": {"component_placement": {"actor": "0-3"}}}, ClusterTopology.from_nodes([NodeInfo(0, 0)])
        )


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


Places = Callable[..., list[ProcessEnvironment]]


def cluster_of(groups: list[dict[str, Any]], num_nodes: int = 1, **extra: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"num_nodes": num_nodes, "node_groups": groups, **extra})


def group(label: str, node_ranks: Any = "all", **options: Any) -> dict[str, Any]:
    """Return a group of four accelerators a node whose `env_configs` give this to all of its nodes."""
    configs = [{"node_ranks": "all", **options}] if options else []
    return {"label": label, "node_ranks": node_ranks, "accelerators": {"per_node": 4}, "env_configs": configs}


def names(cluster: ClusterConfig, node: int, label: str) -> list[str]:
    return [name for name, _ in process_environment(cluster, node, label).variables]


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
    assert of_rollout.variables == (("OMP_NUM_THREADS", "4"),)
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
