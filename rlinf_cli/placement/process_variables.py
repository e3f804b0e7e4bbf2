"""The variables and the interpreter of a process, each with its source and the source's location."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.source import Span
from rlinf_core.config.tree import MappingNode, Path, SequenceNode, find, place
from rlinf_core.placement.environment import (
    PATH_LISTS,
    GroupVariable,
    ProcessEnvironment,
    process_environment,
    ray_interpreter,
)
from rlinf_core.placement.strategy import Placement

AT_LAUNCH = "<at launch>"
NODES_OWN = "<node's own>"
FROM_DRIVER = "<from the driver>"


class Layer(StrEnum):
    """The layer that sets a variable. An upper layer wins over those below it."""

    ENV_CONFIGS = "env_configs"
    PATH_MERGE = "path merge"
    FORWARD_ENV = "forward_env"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True)
class ProcessVariable:
    """A variable of a process.

    Attributes:
        name: the name of the variable.
        value: the value in the process; a part in `<...>` is known only on the node or at launch.
        layer: the layer that sets it.
        span: where it is set in the file; None for the runtime's, or without the file.
        group: the node group whose `env_configs` set it, or None.
    """

    name: str
    value: str
    layer: Layer
    span: Span | None = None
    group: str | None = None


class Interpreter(NamedTuple):
    """The Python of a process.

    Attributes:
        path: its absolute path; None for Ray's interpreter on the node.
        layer: what sets it, in words.
        by_up: Ray's interpreter under `rlinf up`, if `path` is None and the file names one.
        span: where it is set, or None.
    """

    path: str | None
    layer: str
    span: Span | None = None
    by_up: str | None = None


def process_interpreter(cluster: ClusterConfig, placement: Placement, tree: MappingNode | None = None) -> Interpreter:
    """Return the interpreter of a process, with its source."""
    node = placement.cluster_node_rank
    environment = process_environment(cluster, node, placement.node_group_label)
    at = environment.interpreter_path
    if at is None:
        by_up = ray_interpreter(cluster, node)
        layer = f"Ray's; with `rlinf up`: {by_up or 'the path of rlinf itself'}"
        return Interpreter(None, layer, by_up=by_up)
    group = environment.interpreter_group
    layer = f"{Layer.ENV_CONFIGS} of {group}" if group else ".".join(map(str, at))
    return Interpreter(environment.interpreter, layer, place(tree, at) if tree else None)


def process_variables(
    cluster: ClusterConfig,
    placement: Placement,
    tree: MappingNode | None = None,
    environment: ProcessEnvironment | None = None,
) -> list[ProcessVariable]:
    """Return every variable that rlinf sets for a process, in alphabetical order. Secrets are not masked here.

    Args:
        cluster: the machines.
        placement: the process.
        tree: the file of `cluster`, for the locations of its values.
        environment: the environment of the process's node and group; pass it to share it among processes.
    """
    if environment is None:
        environment = process_environment(cluster, placement.cluster_node_rank, placement.node_group_label)
    runtime = {**dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), AT_LAUNCH), **placement.environment()}
    variables = {name: ProcessVariable(name, value, Layer.RUNTIME) for name, value in runtime.items()}
    for index, name in enumerate(cluster.forward_env):
        span = place(tree, ("cluster", "forward_env", index)) if tree else None
        if name in PATH_LISTS:
            variables[name] = ProcessVariable(name, f"{FROM_DRIVER}:{NODES_OWN}", Layer.PATH_MERGE, span)
        else:
            variables[name] = ProcessVariable(name, FROM_DRIVER, Layer.FORWARD_ENV, span)
    for variable in environment.variables:
        variables[variable.name] = _from_group(variable, tree)
    return sorted(variables.values(), key=lambda variable: variable.name)


def _from_group(variable: GroupVariable, tree: MappingNode | None) -> ProcessVariable:
    span = place(tree, _variable_path(tree, variable)) if tree else None
    if variable.name in PATH_LISTS:
        value = f"{variable.value}:{NODES_OWN}"
        return ProcessVariable(variable.name, value, Layer.PATH_MERGE, span, variable.group)
    return ProcessVariable(variable.name, variable.value, Layer.ENV_CONFIGS, span, variable.group)


def _variable_path(tree: MappingNode, variable: GroupVariable) -> Path:
    """Return the path of a value of `env_vars`, which is a list of one-key maps, or one map."""
    if isinstance(find(tree, variable.path), SequenceNode):
        return (*variable.path, variable.index, variable.name)
    return (*variable.path, variable.name)
