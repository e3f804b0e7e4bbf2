"""Where variables come from, and who shares what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlinf_core.config.cluster import ClusterConfig
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reader import decode, read
from rlinf_core.config.tree import Mapping, find, to_data
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.environment import node_environment
from rlinf_core.placement.explain import Layer, UnitUse, process_environment, unit_uses
from rlinf_core.topology import ClusterTopology

TEXT = """
cluster:
  num_nodes: 3
  forward_env: [WANDB_MODE, PATH, NCCL_DEBUG]
  component_placement:
    actor: {node_group: a, placement: 0-3}
    env: {node_group: a, placement: 1-2}
    agent: {node_group: node, placement: 2:0-1}
  node_groups:
    - label: a
      node_ranks: 0-1
      accelerators: {per_node: 2}
      env_configs:
        - node_ranks: 0
          python_interpreter_path: /opt/a/bin/python3
          env_vars:
            - NCCL_DEBUG: INFO
            - LD_LIBRARY_PATH: /opt/a/lib
    - label: everywhere
      node_ranks: all
      accelerators: {per_node: 2}
      env_configs:
        - node_ranks: all
          env_vars: {LEVEL: 2.50, CUDA_VISIBLE_DEVICES: "7"}
"""


@pytest.fixture
def tree() -> Mapping:
    found = Diagnostics()
    source = decode("file.yaml", TEXT.encode(), found)
    assert source is not None
    tree = read(source, found)
    assert tree is not None
    return tree


@pytest.fixture
def cluster(tree: Mapping) -> ClusterConfig:
    section = find(tree, ("cluster",))
    assert section is not None
    return ClusterConfig.model_validate(to_data(section))


def test_env_configs_apply_to_a_node_whatever_group_selected_it(cluster: ClusterConfig) -> None:
    names = {rank: [each.name for each in node_environment(cluster, rank).variables] for rank in range(3)}
    assert names[0] == ["NCCL_DEBUG", "LD_LIBRARY_PATH", "LEVEL", "CUDA_VISIBLE_DEVICES"]
    assert names[1] == names[2] == ["LEVEL", "CUDA_VISIBLE_DEVICES"]
    assert node_environment(cluster, 0).interpreter == "/opt/a/bin/python3"
    assert node_environment(cluster, 0).interpreter_group == "a"
    assert node_environment(cluster, 1).interpreter is None


def test_all_in_an_entry_is_its_group_and_no_more() -> None:
    data = {"label": "a", "node_ranks": 1, "env_configs": [{"node_ranks": "all", "env_vars": {"A": "1"}}]}
    cluster = ClusterConfig.model_validate({"num_nodes": 2, "node_groups": [data]})
    assert [len(node_environment(cluster, rank).variables) for rank in range(2)] == [0, 1]


def test_lists_of_directories_go_before_the_nodes_own(cluster: ClusterConfig) -> None:
    environment = node_environment(cluster, 0)
    own = {"LD_LIBRARY_PATH": "/usr/lib", "NCCL_DEBUG": "WARN", "HOME": "/root"}
    merged = environment.over(own)
    assert merged["LD_LIBRARY_PATH"] == "/opt/a/lib:/usr/lib"
    assert (merged["NCCL_DEBUG"], merged["HOME"], merged["LEVEL"]) == ("INFO", "/root", "2.50")
    # An empty entry of such a list would mean the current directory.
    assert environment.over({})["LD_LIBRARY_PATH"] == "/opt/a/lib"
    assert environment.over({"LD_LIBRARY_PATH": ""})["LD_LIBRARY_PATH"] == "/opt/a/lib"
    assert environment.for_ray()["LD_LIBRARY_PATH"] == "/opt/a/lib:${LD_LIBRARY_PATH}"


def test_each_variable_says_what_set_it_and_where(cluster: ClusterConfig, tree: Mapping) -> None:
    topology = ClusterTopology.from_config(cluster)
    placement = ComponentPlacement(cluster, topology).get_strategy("actor").get_placement(topology)[1]
    found = process_environment(cluster, placement, tree)
    assert [each.name for each in found] == sorted(each.name for each in found)
    told = {each.name: (each.value, each.layer, each.span.text if each.span else None) for each in found}
    assert told == {
        "CUDA_VISIBLE_DEVICES": ("7", Layer.ENV_CONFIGS, '"7"'),
        "LD_LIBRARY_PATH": ("/opt/a/lib:<node's own>", Layer.PATH_MERGE, "/opt/a/lib"),
        "LEVEL": ("2.50", Layer.ENV_CONFIGS, "2.50"),
        "LOCAL_RANK": ("0", Layer.RUNTIME, None),
        "LOCAL_WORLD_SIZE": ("1", Layer.RUNTIME, None),
        "MASTER_ADDR": ("<at launch>", Layer.RUNTIME, None),
        "MASTER_PORT": ("<at launch>", Layer.RUNTIME, None),
        "NCCL_DEBUG": ("INFO", Layer.ENV_CONFIGS, "INFO"),
        "NODE_LOCAL_RANK": ("1", Layer.RUNTIME, None),
        "NODE_RANK": ("0", Layer.RUNTIME, None),
        "PATH": ("<from the driver>:<node's own>", Layer.PATH_MERGE, "PATH"),
        "RANK": ("1", Layer.RUNTIME, None),
        "WANDB_MODE": ("<from the driver>", Layer.FORWARD_ENV, "WANDB_MODE"),
        "WORLD_SIZE": ("4", Layer.RUNTIME, None),
    }
    groups = {each.name: each.group for each in found if each.group}
    assert groups == {
        "CUDA_VISIBLE_DEVICES": "everywhere",
        "LEVEL": "everywhere",
        "LD_LIBRARY_PATH": "a",
        "NCCL_DEBUG": "a",
    }


def test_without_the_file_there_are_values_but_no_places(cluster: ClusterConfig) -> None:
    topology = ClusterTopology.from_config(cluster)
    placement = ComponentPlacement(cluster, topology).get_strategy("agent").get_placement(topology)[0]
    found = process_environment(cluster, placement)
    assert not any(each.span for each in found)
    assert {each.name: each.value for each in found}["LEVEL"] == "2.50"


def test_every_unit_is_listed_with_its_users(cluster: ClusterConfig) -> None:
    topology = ClusterTopology.from_config(cluster)
    components = ComponentPlacement(cluster, topology)
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
    assert [use.shared for use in uses] == [False, True, True, False, False, False, False]
    assert [use.idle for use in uses] == [False, False, False, False, True, True, False]


def test_robots_and_bare_nodes_are_units_too(
    eighteen: ClusterConfig, make_cluster: Callable[..., ClusterConfig]
) -> None:
    topology = ClusterTopology.from_config(eighteen)
    robots = [use for use in unit_uses(topology, {}) if use.hardware_type == "Franka"]
    assert [(use.node_rank, use.local_hardware_rank, use.idle) for use in robots] == [(16, 0, True), (17, 0, True)]
    bare = ClusterTopology.from_config(make_cluster(2, 0))
    assert [(use.node_rank, use.hardware_type) for use in unit_uses(bare, {})] == [(0, "node"), (1, "node")]
