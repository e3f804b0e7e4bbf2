"""Placements of the documents: worked examples, and the configurations that came with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import HybridComponentPlacement
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.node.environment import process_environment
from rlinf_core.placement.component import ComponentPlacement, PlacementMode
from rlinf_core.placement.strategies import PackedPlacementStrategy
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology

Make = Callable[..., ClusterConfig]
PlaceOne = Callable[..., list[Placement]]


def where(placements: list[Placement]) -> list[tuple[int, list[int]]]:
    """(node, local hardware ranks) of every process."""
    assert [placement.rank for placement in placements] == list(range(len(placements)))
    assert {placement.world_size for placement in placements} <= {len(placements)}
    return [(placement.cluster_node_rank, list(placement.local_hardware_ranks)) for placement in placements]


def on(node: int, *locals_: int | list[int]) -> list[tuple[int, list[int]]]:
    return [(node, [item] if isinstance(item, int) else item) for item in locals_]


@pytest.mark.parametrize(
    ("nodes", "per_node", "written", "places", "facts"),
    [
        (1, 8, "0-7", on(0, *range(8)), {"local_rank": [*range(8)]}),
        (
            *(2, 4, "all", on(0, 0, 1, 2, 3) + on(1, 0, 1, 2, 3)),
            {"local_rank": [0, 1, 2, 3] * 2, "placement_node_rank": [0] * 4 + [1] * 4, "local_world_size": [4] * 8},
        ),
        (1, 8, "0-1:0-3", on(0, 0, 0, 1, 1), {}),
        (1, 8, "0-7:0-3", on(0, [0, 1], [2, 3], [4, 5], [6, 7]), {}),
        (2, 8, "0-1:0-3,3-5,7-10:7-14", on(0, 0, 0, 1, 1, 3, 4, 5, 7, 7) + on(1, 0, 0, 1, 1, 2, 2), {}),
        (1, 8, "0-2,5,7", on(0, 0, 1, 2, 5, 7), {}),
        (2, 0, "0-1", on(0, 0) + on(1, 0), {"hardware_type": ["node"] * 2}),
        (
            *(2, 8, {"node_group": "node", "placement": "0-1:0-3"}, on(0, [], []) + on(1, [], [])),
            {"local_accelerator_rank": [None] * 4, "visible_accelerators": [tuple(range(8))] * 4},
        ),
    ],
    ids=[
        *("an accelerator each", "all over two nodes", "several of a resource", "several resources each"),
        *("parts of every kind", "resources with gaps", "nodes without accelerators", "nodes whatever they hold"),
    ],
)
def test_worked_example(
    make_cluster: Make, place_one: PlaceOne, nodes: int, per_node: int, written: Any, places: Any, facts: Any
) -> None:
    placements = place_one(make_cluster(nodes, per_node, placement={"actor": written}))
    assert where(placements) == places
    assert {name: [getattr(placement, name) for placement in placements] for name in facts} == facts
    by_accelerators = per_node > 0 and isinstance(written, str)
    assert {"CUDA_VISIBLE_DEVICES" in item.environment() for item in placements} == {by_accelerators}


@pytest.mark.parametrize(("labels", "first", "second"), [("a800,4090", 0, 1), ([4090, "a800"], 1, 0)])
def test_groups_count_in_their_order(
    make_cluster: Make, place_one: PlaceOne, two_kinds: Any, labels: Any, first: int, second: int
) -> None:
    entry = {"node_group": labels, "placement": "6-9"}
    placements = place_one(make_cluster(2, groups=two_kinds, placement={"actor": entry}))
    assert where(placements) == on(first, 6, 7) + on(second, 0, 1)
    names = ("a800", "4090")
    expected = [names[first]] * 2 + [names[second]] * 2
    assert [placement.node_group_label for placement in placements] == expected
    assert [placement.placement_node_rank for placement in placements] == [0, 0, 1, 1]


def test_ranks_are_local_to_the_group(make_cluster: Make, place_one: PlaceOne) -> None:
    groups = [{"label": "b", "node_ranks": "1-2", "accelerators": {"per_node": 8}}]
    placements = place_one(
        make_cluster(3, groups=groups, placement={"actor": {"node_group": "b", "placement": "4-11"}})
    )
    assert where(placements) == on(1, 4, 5, 6, 7) + on(2, 0, 1, 2, 3)
    assert [placement.placement_node_rank for placement in placements] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_two_components_on_the_same_accelerators(make_cluster: Make) -> None:
    cluster = make_cluster(1, 8, placement={"actor,rollout": "0-3"})
    topology = ClusterTopology.from_config(cluster)
    components = ComponentPlacement(cluster, topology)
    assert components.components == ("actor", "rollout")
    for name in components.components:
        assert where(components.get_strategy(name).get_placement(topology)) == on(0, 0, 1, 2, 3)
        assert components.get_world_size(name) == 4
        assert components.get_hardware_ranks(name) == [0, 1, 2, 3]
    assert components.placement_mode is PlacementMode.COLLOCATED


def test_packed_with_a_stride(make_cluster: Make) -> None:
    topology = ClusterTopology.from_config(make_cluster(1, 8))
    strategy = PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2)
    assert where(strategy.get_placement(topology)) == on(0, [0, 2], [1, 3], [4, 6], [5, 7])


@pytest.mark.parametrize(("isolate", "local"), [(True, ("0", "1")), (False, ("2", "4"))])
def test_local_rank_follows_what_a_process_sees(
    make_cluster: Make, place_one: PlaceOne, isolate: bool, local: tuple[str, str]
) -> None:
    cluster = make_cluster(1, 8, placement={"actor": "0-7:0-3"})
    environment = place_one(cluster, isolate_accelerator=isolate)[1].environment()
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == local
    assert environment["CUDA_VISIBLE_DEVICES"] == ("2,3" if isolate else "0,1,2,3,4,5,6,7")
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["NODE_LOCAL_RANK"]) == ("1", "4", "1")


EIGHTEEN_NODES = """\
cluster:
  num_nodes: 18

  component_placement:
    actor:
      node_group: a800
      placement: 0-63           # 在 ``a800`` 节点组内部的硬件编号
    rollout:
      node_group: 4090
      placement: 0-63           # 在 ``4090`` 节点组内部的硬件编号
    env:
      node_group: franka
      placement: 0-1            # 在 ``franka`` 节点组内部的机器人硬件编号
    agent:
      node_group: node
      placement: 0-1:0-199,2-3:200-399  # 节点编号 : 进程编号

  node_groups:
    - label: a800
      node_ranks: 0-7
      env_configs:
        - node_ranks: 0-7
          python_interpreter_path: /opt/venv/openpi/bin/python3
          env_vars:
            - GLOO_SOCKET_IFNAME: "eth0"

    - label: 4090
      node_ranks: 8-15
      env_configs:
        - node_ranks: 8-15
          env_vars:
            - GLOO_SOCKET_IFNAME: "eth1"

    - label: franka
      node_ranks: 16-17
      hardware:
        type: Franka
        configs:
          - robot_ip: "10.10.10.1"
            node_rank: 16
            camera_serials:
              - "322142001230"
              - "322142001231"
          - robot_ip: "10.10.10.2"
            node_rank: 17
            camera_serials:
              - "322142001232"
              - "322142001233"
"""
ONE_NODE = """\
cluster:
  num_nodes: 1
  component_placement:
    actor: 0-7
    env: 0-3
    rollout: 4-7
"""


def load(text: str, *assume: str) -> Any:
    job = load_with_lint("-", stdin=text.encode(), assume=assume, environ={})
    assert job.cluster is not None
    assert [diagnostic.message for diagnostic in job.diagnostics if diagnostic.severity is not Severity.NOTE] == []
    return job


def places(job: Any, name: str) -> list[Placement]:
    return HybridComponentPlacement(job.cluster, job.topology).get_strategy(name).get_placement(job.topology)


def test_eighteen_nodes_are_valid_whatever_they_turn_out_to_have() -> None:
    assert {diagnostic.code for diagnostic in load(EIGHTEEN_NODES).diagnostics} == {"accelerators-unknown"}


def test_every_process_of_eighteen_nodes_has_its_place() -> None:
    job = load(EIGHTEEN_NODES, "a800=8", "4090=8")
    components = ComponentPlacement(job.cluster, job.topology)
    worlds = {name: components.get_world_size(name) for name in components.components}
    assert worlds == {"actor": 64, "rollout": 64, "env": 2, "agent": 400}
    assert components.placement_mode is PlacementMode.DISAGGREGATED
    for name, label, first in (("actor", "a800", 0), ("rollout", "4090", 8)):
        assert where(places(job, name)) == [(first + rank // 8, [rank % 8]) for rank in range(64)]
        assert {place.node_group_label for place in places(job, name)} == {label}
    agents = places(job, "agent")
    assert [agent.cluster_node_rank for agent in agents] == [0] * 100 + [1] * 100 + [2] * 100 + [3] * 100
    assert {(agent.local_world_size, agent.local_accelerator_rank) for agent in agents} == {(100, None)}
    robots = {robot.config.robot_ip: robot.config for node in job.topology.nodes for robot in node.robots}
    assert robots["10.10.10.2"].camera_serials == ("322142001232", "322142001233")


@pytest.mark.parametrize(("assumed", "visible"), [((), ()), (("franka=2",), (0, 1))])
def test_a_robots_process_sees_all_accelerators_of_its_node(assumed: tuple[str, ...], visible: tuple[int, ...]) -> None:
    arms = places(load(EIGHTEEN_NODES, "a800=8", "4090=8", *assumed), "env")
    assert where(arms) == on(16, 0) + on(17, 0)
    assert {(arm.hardware_type, arm.visible_accelerators) for arm in arms} == {("Franka", visible)}
    assert {arm.local_accelerator_rank for arm in arms} == {None}
    assert not any("CUDA_VISIBLE_DEVICES" in arm.environment() for arm in arms)


def test_two_processes_a_robot() -> None:
    topology = load(EIGHTEEN_NODES).topology
    config = {"cluster": {"component_placement": {"env": {"node_group": "franka", "placement": "0-1:0-3"}}}}
    placements = ComponentPlacement(config, topology).get_strategy("env").get_placement(topology)
    assert where(placements) == on(16, 0, 0) + on(17, 0, 0)


@pytest.mark.parametrize(
    ("node", "group", "interpreter", "variables"),
    [
        (0, "a800", "/opt/venv/openpi/bin/python3", {"GLOO_SOCKET_IFNAME": "eth0"}),
        (15, "4090", None, {"GLOO_SOCKET_IFNAME": "eth1"}),
        (16, "franka", None, {}),
        # Neither hardware nor a group's environment: nodes alone.
        (0, "node", None, {}),
    ],
)
def test_processes_have_the_environment_of_their_group(
    node: int, group: str, interpreter: str | None, variables: dict[str, str]
) -> None:
    result = process_environment(load(EIGHTEEN_NODES).cluster, node, group)
    assert (result.interpreter, result.values({})) == (interpreter, variables)


@pytest.mark.parametrize(("per_node", "processes"), [(8, 128), (0, 16)], ids=["accelerators", "none"])
def test_without_hardware_ranks_count_accelerators_or_else_nodes(per_node: int, processes: int) -> None:
    job = load(EIGHTEEN_NODES.replace("placement: 0-63 ", "placement: all "), f"a800={per_node}", f"4090={per_node}")
    results = [*places(job, "actor"), *places(job, "rollout")]
    assert len(results) == processes
    assert Counter(result.cluster_node_rank for result in results) == dict.fromkeys(range(16), per_node or 1)
    assert {result.hardware_type == "node" for result in results} == {per_node == 0}


@pytest.mark.parametrize(
    ("wrong", "right", "code"),
    [
        ("label: a800", "label: node", "reserved-label"),
        ("label: 4090", "label: a800", "duplicate-label"),
        ("        - node_ranks: 0-7\n", "        - node_ranks: 0-8\n", "env-config-outside-group"),
        (
            '            - GLOO_SOCKET_IFNAME: "eth1"\n',
            '            - GLOO_SOCKET_IFNAME: "eth1"\n            - GLOO_SOCKET_IFNAME: "eth2"\n',
            "duplicate-env-var",
        ),
        ("node_group: a800", "node_group: A800", "unknown-node-group"),
    ],
)
def test_what_it_rules_out_is_an_error(wrong: str, right: str, code: str) -> None:
    assert EIGHTEEN_NODES.count(wrong) == 1
    job = load_with_lint("-", stdin=EIGHTEEN_NODES.replace(wrong, right).encode(), environ={})
    assert code in {diagnostic.code for diagnostic in job.diagnostics if diagnostic.severity is Severity.ERROR}


def test_one_node_of_eight_in_the_hybrid_mode() -> None:
    job = load(ONE_NODE, "8")
    placement = HybridComponentPlacement(job.cluster, job.topology)
    assert placement.placement_mode is PlacementMode.HYBRID
    ranks = {name: [place.local_hardware_ranks for place in places(job, name)] for name in placement.components}
    assert ranks == {
        "actor": [(rank,) for rank in range(8)],
        "env": [(rank,) for rank in range(4)],
        "rollout": [(rank,) for rank in range(4, 8)],
    }


def test_the_keys_that_are_named_are_there() -> None:
    keys = {
        "rollout.model_dir": "/m",
        "actor.tokenizer.tokenizer_model": "/t",
        "actor.checkpoint_load_path": "/c",
        "runner.logger.log_path": "/l",
        "actor.checkpoint_save_path": "/s",
        "runner.max_epochs": 7,
        "runner.max_steps": 9,
        "actor.global_batch_size": 64,
        "actor.micro_batch_size": 2,
    }
    for recipe in ("embodied", "math"):
        job = load_with_lint(
            "-",
            [f"{key}={value}" for key, value in keys.items()],
            stdin=f"recipe: {recipe}\n{ONE_NODE}".encode(),
            environ={},
            assume=("8",),
        )
        wrong = [diagnostic.message for diagnostic in job.diagnostics if diagnostic.code == "unknown-key"]
        assert wrong == [], recipe
