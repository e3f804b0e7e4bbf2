"""The interpreter and the variables that node groups give to every process on a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlinf_core.config.cluster import ClusterConfig
from rlinf_core.config.tree import Path

# Lists of directories, searched in order. A value given for one is put before the node's own: replacing it would hide
# the node's CUDA, its Python packages or its ROS.
PATH_LISTS: Final = frozenset(
    (
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "PKG_CONFIG_PATH",
        "CMAKE_PREFIX_PATH",
        "MANPATH",
        "INFOPATH",
        "XDG_DATA_DIRS",
        "XDG_CONFIG_DIRS",
        "ROS_PACKAGE_PATH",
        "AMENT_PREFIX_PATH",
        "COLCON_PREFIX_PATH",
        "GST_PLUGIN_PATH",
        "QT_PLUGIN_PATH",
        "GZ_SIM_RESOURCE_PATH",
        "GAZEBO_MODEL_PATH",
        "PERL5LIB",
        "NODE_PATH",
    )
)


@dataclass(frozen=True, slots=True)
class NodeVariable:
    """A variable that a node group gives to a node.

    Attributes:
        name, value: as written.
        group: the label of the group.
        path: where the `env_vars` that hold it stand in the file.
        index: which of them it is.
    """

    name: str
    value: str
    group: str
    path: Path
    index: int

    @property
    def prepended(self) -> bool:
        """Whether the value goes before the node's own instead of replacing it."""
        return self.name in PATH_LISTS


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What the node groups say about the processes of a node.

    Attributes:
        variables: in the order of the file, each name once.
        interpreter: the absolute path of the Python to run, or None for the one that Ray was started with.
        interpreter_path: where that stands in the file, or None.
        interpreter_group: the label of the group that gives it, or None.
    """

    variables: tuple[NodeVariable, ...] = ()
    interpreter: str | None = None
    interpreter_path: Path | None = None
    interpreter_group: str | None = None

    def for_ray(self) -> dict[str, str]:
        """Return the variables for Ray's `runtime_env`, in which `${PATH}` stands for the node's own value."""
        return {
            each.name: f"{each.value}:${{{each.name}}}" if each.prepended else each.value for each in self.variables
        }

    def over(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process on the node whose own environment is `own`."""
        merged = dict(own)
        for each in self.variables:
            before = own.get(each.name) if each.prepended else None
            merged[each.name] = f"{each.value}:{before}" if before else each.value
        return merged


def node_environment(cluster: ClusterConfig, node_rank: int) -> NodeEnvironment:
    """Return what applies to every process on a node, whatever group selected it.

    Of several values for one variable the first counts; a valid file has no two that differ.
    """
    variables: dict[str, NodeVariable] = {}
    interpreter: str | None = None
    interpreter_path: Path | None = None
    interpreter_group: str | None = None
    for group_index, group in enumerate(cluster.node_groups):
        if node_rank not in group.node_ranks:
            continue
        for config_index, config in enumerate(group.env_configs):
            if node_rank not in config.node_ranks:
                continue
            at: Path = ("cluster", "node_groups", group_index, "env_configs", config_index)
            for index, (name, value) in enumerate(config.env_vars):
                variables.setdefault(name, NodeVariable(name, value, group.label, (*at, "env_vars"), index))
            if interpreter is None and config.python_interpreter_path is not None:
                interpreter, interpreter_group = config.python_interpreter_path, group.label
                interpreter_path = (*at, "python_interpreter_path")
    return NodeEnvironment(tuple(variables.values()), interpreter, interpreter_path, interpreter_group)
