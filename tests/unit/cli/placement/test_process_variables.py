"""Where the variables of a process come from, and its Python."""

from __future__ import annotations

import pytest

from rlinf_cli.placement.job_layout import Layer, process_interpreter, process_variables
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.reading import decode, read
from rlinf_core.config.tree import MappingNode, find, to_data
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy
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
def tree() -> MappingNode:
    diagnostics = Diagnostics()
    source = decode("file.yaml", TEXT.encode(), diagnostics)
    assert source is not None
    tree = read(source, diagnostics)
    assert tree is not None
    return tree


@pytest.fixture
def cluster(tree: MappingNode) -> ClusterConfig:
    section = find(tree, ("cluster",))
    assert section is not None
    return ClusterConfig.model_validate(to_data(section))


def test_each_variable_says_what_set_it_and_where(cluster: ClusterConfig, tree: MappingNode) -> None:
    topology = ClusterTopology.from_config(cluster)
    placement = ComponentPlacement(cluster, topology).get_strategy("actor").get_placement(topology)[1]
    diagnostics = process_variables(cluster, placement, tree)
    assert [diagnostic.name for diagnostic in diagnostics] == sorted(diagnostic.name for diagnostic in diagnostics)
    values = {
        diagnostic.name: (diagnostic.value, diagnostic.layer, diagnostic.span.text if diagnostic.span else None)
        for diagnostic in diagnostics
    }
    assert values == {
        "CUDA_VISIBLE_DEVICES": ("1", Layer.RUNTIME, None),
        "LD_LIBRARY_PATH": ("/opt/a/lib:<node's own>", Layer.PATH_MERGE, "/opt/a/lib"),
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
    groups = {diagnostic.name: diagnostic.group for diagnostic in diagnostics if diagnostic.group}
    assert groups == {"LD_LIBRARY_PATH": "a", "NCCL_DEBUG": "a"}


def test_what_a_group_gives_wins_over_the_runtime(cluster: ClusterConfig, tree: MappingNode) -> None:
    topology = ClusterTopology.from_config(cluster)
    placement = FlexiblePlacementStrategy([[2]], "everywhere").get_placement(topology)[0]
    values = {
        process_variable.name: (process_variable.value, process_variable.layer, process_variable.group)
        for process_variable in process_variables(cluster, placement, tree)
    }
    assert values["CUDA_VISIBLE_DEVICES"] == ("7", Layer.ENV_CONFIGS, "everywhere")
    assert values["LEVEL"] == ("2.50", Layer.ENV_CONFIGS, "everywhere")
    assert "LD_LIBRARY_PATH" not in values


def test_without_the_file_there_are_values_but_no_places(cluster: ClusterConfig) -> None:
    topology = ClusterTopology.from_config(cluster)
    placement = ComponentPlacement(cluster, topology).get_strategy("actor").get_placement(topology)[0]
    diagnostics = process_variables(cluster, placement)
    assert not any(diagnostic.span for diagnostic in diagnostics)
    assert {diagnostic.name: diagnostic.value for diagnostic in diagnostics}["NCCL_DEBUG"] == "INFO"


def test_a_default_interpreter_is_named_as_the_layer() -> None:
    cluster = ClusterConfig.model_validate({"num_nodes": 1, "python_interpreter_path": "/opt/bin/python"})
    (placement,) = NodePlacementStrategy([0]).get_placement(ClusterTopology.from_config(cluster))
    assert process_interpreter(cluster, placement).layer == "cluster.python_interpreter_path"
