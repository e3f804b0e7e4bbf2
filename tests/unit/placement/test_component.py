"""ComponentPlacement: what it takes, what it tells, and how it refuses, error by error of the specification."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.errors import PlacementError
from rlinf_core.placement.component import ComponentPlacement, HybridComponentPlacement, PlacementMode
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


@pytest.mark.parametrize("form", [{}, {"cluster": {}}, SimpleNamespace(cluster=None)])
def test_a_configuration_that_places_nothing_is_refused(form: Any) -> None:
    with pytest.raises(PlacementError, match="does not place any component"):
        ComponentPlacement(form, ONE_BY_EIGHT)


def test_an_unknown_component_gets_the_nearest() -> None:
    components = of(ONE_BY_EIGHT, actor="0-3")
    for ask in (components.get_strategy, components.get_world_size, components.get_hardware_ranks):
        with pytest.raises(PlacementError, match="component `acter` is not placed") as caught:
            ask("acter")
        assert caught.value.help == "did you mean `actor`?"


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
        ([], "the list is empty"),
        ({"placement": "0", "node_groups": "node"}, "unknown key `node_groups`"),
        ({"node_group": "node"}, "`placement` is missing"),
        ({"placement": "0", "node_group": "no de"}, "a name cannot contain"),
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
