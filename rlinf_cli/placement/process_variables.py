"""The environment of one process: its interpreter and every variable, each with its source; as text and as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rlinf_cli.console import console
from rlinf_cli.job.job_file import SoundJob
from rlinf_cli.placement.job_layout import masked, secret_texts
from rlinf_cli.placement.placement_picture import hosts_by_rank, robot_numbers
from rlinf_core.config.diagnostics import visible
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.ranks import format_ranks
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

SCHEMA: Final = "rlinf.env/1"
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


def env_text(job: SoundJob, component: str, placement: Placement) -> str:
    """Return the environment for people."""
    node = placement.cluster_node_rank
    host = hosts_by_rank(job.cluster).get(node)
    where = f"node {node} ({host})" if host else f"node {node}"
    held = ""
    if placement.local_hardware_ranks:
        numbers, kind = robot_numbers(job.topology), placement.hardware_type
        units = [numbers.get((node, kind, local), local) for local in placement.local_hardware_ranks]
        held = f", {kind} {format_ranks(units)}"
    python = process_interpreter(job.cluster, placement, job.tree)
    set_by = _origin(python.layer, python.span)
    secrets = secret_texts(job)
    rows = [
        (
            variable.name,
            visible(masked(variable.name, variable.value, secrets)) or '""',
            _origin(layer_text(variable), variable.span),
        )
        for variable in process_variables(job.cluster, placement, job.tree)
    ]
    head = console.style(f"{component}:{placement.rank}", "bold")
    return "\n".join(
        [
            f"{head} on {where}{held}",
            "",
            console.table(("python", "set by"), [(python.path or "the node's own", set_by)]),
            "",
            console.table(("variable", "value", "set by"), rows),
        ]
    )


def env_record(job: SoundJob, component: str, placement: Placement) -> dict[str, Any]:
    """Return the format `rlinf.env/1`."""
    python = process_interpreter(job.cluster, placement, job.tree)
    secrets = secret_texts(job)
    return {
        "schema": SCHEMA,
        "component": component,
        "rank": placement.rank,
        "node_rank": placement.cluster_node_rank,
        "python": python.path,
        "python_layer": python.layer,
        "python_by_up": python.by_up,
        "python_place": _place_record(python.span),
        "variables": [
            {
                "name": variable.name,
                "value": masked(variable.name, variable.value, secrets),
                "layer": str(variable.layer),
                "node_group": variable.group,
                "place": _place_record(variable.span),
            }
            for variable in process_variables(job.cluster, placement, job.tree)
        ],
    }


def layer_text(variable: ProcessVariable) -> str:
    """Return `runtime`, `env_configs of a800`."""
    return f"{variable.layer} of {variable.group}" if variable.group else str(variable.layer)


def _origin(layer: str, span: Span | None) -> str:
    """Return `runtime`, `env_configs of a800, job.yaml:24`."""
    return f"{layer}, {span.source.name}:{span.begin.line}" if span else layer


def _place_record(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {"file": span.source.name, "line": span.begin.line, "column": span.begin.column}
