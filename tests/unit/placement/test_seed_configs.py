"""The configurations that describe a heterogeneous cluster and the modes of a run, typed as they stand there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rlinf_cli.job.load import load_with_lint
from rlinf_core import HybridComponentPlacement, PlacementMode
from rlinf_core.config.diagnostics import Severity
from rlinf_core.placement.environment import process_environment
from rlinf_core.placement.strategy import Placement

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
    for name, first in (("actor", 0), ("rollout", 8)):
        results = [(place.cluster_node_rank, place.local_hardware_ranks) for place in places(job, name)]
        assert results == [(first + rank // 8, (rank % 8,)) for rank in range(64)]
    arms = places(job, "env")
    assert [(arm.cluster_node_rank, arm.local_hardware_ranks, arm.hardware_type) for arm in arms] == [
        (16, (0,), "Franka"),
        (17, (0,), "Franka"),
    ]
    agents = places(job, "agent")
    assert Counter(agent.cluster_node_rank for agent in agents) == dict.fromkeys(range(4), 100)
    assert [agent.rank for agent in agents if agent.cluster_node_rank == 2] == list(range(200, 300))
    assert {agent.local_accelerator_rank for agent in agents} == {None}
    robots = {robot.config.robot_ip: robot.config for node in job.topology.nodes for robot in node.robots}
    assert robots["10.10.10.2"].camera_serials == ("322142001232", "322142001233")


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
