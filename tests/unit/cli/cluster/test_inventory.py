from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlinf_cli.cluster.inventory import NodeTarget, recorded_targets
from rlinf_core.errors import ConfigError
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode

Nodes = Callable[..., tuple[NodeTarget, ...]]

MIXED = """\
cluster:
  num_nodes: 4
  ports: 21000-21499
  ssh: {user: me, options: {ProxyJump: gate}}
  forward_env: [WANDB_API_KEY]
  node_groups:
    - label: train
      node_ranks: 0-1
      hosts: trainer[00-01]
      accelerators: {per_node: 8}
      env_configs:
        - node_ranks: 0
          python_interpreter_path: /opt/a/bin/python
          env_vars: [{A: 1}, {PATH: /opt/a/bin}]
    - label: franka
      node_ranks: 2-3
      hosts: [robot, me@lab]
      ssh: {user: pi, port: 2222, options: {Compression: yes}}
      hardware: {type: Franka, configs: [{node_rank: 3, robot_ip: 10.0.0.9}]}
"""


@pytest.fixture
def mixed(make_nodes: Nodes) -> tuple[NodeTarget, ...]:
    return make_nodes(text=MIXED)


def test_each_node_has_its_host_group_and_interpreter(mixed: tuple[NodeTarget, ...]) -> None:
    assert [(node.rank, node.host, node.groups) for node in mixed] == [
        (0, "trainer00", ("train",)),
        (1, "trainer01", ("train",)),
        (2, "robot", ("franka",)),
        (3, "me@lab", ("franka",)),
    ]
    assert [(node.interpreter, node.declared_interpreter) for node in mixed[:2]] == [
        ("/opt/a/bin/python", True),
        ("/opt/python", False),
    ]
    assert mixed[0].accelerators is not None
    assert mixed[0].accelerators.per_node == 8
    assert [kind for kind, _ in mixed[3].robots] == ["Franka"]
    assert mixed[2].robots == ()


def test_a_groups_ssh_settings_win_value_by_value(mixed: tuple[NodeTarget, ...]) -> None:
    assert (mixed[0].ssh.user, mixed[0].ssh.port, mixed[0].ssh.options) == ("me", None, {"ProxyJump": "gate"})
    assert (mixed[2].ssh.user, mixed[2].ssh.port) == ("pi", 2222)
    assert mixed[2].ssh.options == {"ProxyJump": "gate", "Compression": "yes"}


def test_reaching_a_node_has_its_own_time_and_this_machine_none(make_nodes: Nodes) -> None:
    text = "cluster: {num_nodes: 1, hosts: [h], ssh: {connect_timeout: 3}}"
    assert [node.connect_seconds for node in make_nodes(text=text)] == [3.0]
    assert [node.connect_seconds for node in make_nodes(1)] == [10.0]
    assert [node.connect_seconds for node in make_nodes(text="cluster: {num_nodes: 1}")] == [0.0]


def test_ray_gets_no_variable_of_a_group(mixed: tuple[NodeTarget, ...]) -> None:
    assert [node.env for node in mixed[::3]] == [
        {"RLINF_NODE_RANK": rank, "RLINF_PORTS": "21339-21499"} for rank in ("0", "3")
    ]
    assert mixed[0].forwarded == ("WANDB_API_KEY",)


TWO_GROUPS = """\
cluster:
  num_nodes: 2
  node_groups:
    - label: a
      node_ranks: 0-1
      env_configs: [{node_ranks: 0-1, python_interpreter_path: /opt/a/bin/python, env_vars: {A: 1, PATH: /opt/a}}]
    - label: b
      node_ranks: 1
      env_configs: [{node_ranks: 1, python_interpreter_path: /opt/b/bin/python}]
"""


def test_the_environments_of_a_node_are_those_of_its_groups(make_nodes: Nodes) -> None:
    one, both = make_nodes(text=TWO_GROUPS)
    assert (one.interpreter, one.declared_interpreter) == ("/opt/a/bin/python", True)
    # Two groups disagree: Ray runs with neither, but with the path that rlinf itself has.
    assert (both.interpreter, both.declared_interpreter) == ("/opt/python", False)
    assert [environment.label for environment in one.environments] == ["a"]
    assert [(environment.label, environment.interpreter) for environment in both.environments] == [
        ("a", "/opt/a/bin/python"),
        ("b", "/opt/b/bin/python"),
    ]
    assert both.environments[0].request() == {
        "interpreter": "/opt/a/bin/python",
        "env": {"A": "1", "PATH": "/opt/a"},
        "prepended": ["PATH"],
    }


def test_labels_and_names_that_ray_refuses(make_nodes: Nodes) -> None:
    text = "cluster:\n  num_nodes: 1\n  node_groups: [{label: 'a;$(b)', node_ranks: 0}]\n"
    labels = make_nodes(text=text)[0].labels
    assert labels["rlinf.io/rank"] == "0"
    assert labels["rlinf.io/group"].startswith("g-")
    assert labels["rlinf.io/group"][2:].isalnum()
    assert make_nodes(text=text.replace("a;$(b)", "a800"))[0].labels["rlinf.io/group"] == "a800"


def test_the_variables_of_a_group_may_change_while_ray_runs(make_nodes: Nodes, mixed: tuple[NodeTarget, ...]) -> None:
    other = make_nodes(text=MIXED.replace("A: 1", "A: 2"))
    assert mixed[0].fingerprint() == other[0].fingerprint()
    moved = make_nodes(text=MIXED.replace("/opt/a/bin/python", "/opt/c/bin/python"))
    assert mixed[0].fingerprint() != moved[0].fingerprint()


def test_hosts_for_some_nodes_only_are_refused(make_nodes: Nodes) -> None:
    text = "cluster:\n  num_nodes: 3\n  node_groups: [{label: a, node_ranks: 0, hosts: h}]\n"
    with pytest.raises(ConfigError, match="nodes 1-2 have no host"):
        make_nodes(text=text)


def test_without_hosts_every_node_is_this_machine(make_nodes: Nodes) -> None:
    nodes: Any = make_nodes(text="cluster: {num_nodes: 2}")
    assert [node.host for node in nodes] == [None, None]
    assert nodes[0].name == "node 0 (this machine)"


def test_recorded_targets_suffice_to_reach_a_node() -> None:
    node = RecordedNode(1, "i", ("g",), "/opt/python", {"user": "me", "options": {"Compression": "yes"}}, "10.0.0.1")
    record = ClusterRecord("a", "1d", "a.yaml", "10.0.0.1:20000", True, (20000, 20999), (node,))
    target = recorded_targets(record)[0]
    assert (target.rank, target.host, target.interpreter, target.ssh.user) == (1, "i", "/opt/python", "me")
    assert target.ssh.options == {"Compression": "yes"}
    assert target.ports.gcs == 20000
