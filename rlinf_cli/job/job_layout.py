"""The layout of a job's processes on its declared or assumed hardware, and the environment of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rlinf_cli import console
from rlinf_cli.job.job_file import SoundJob
from rlinf_cli.job.picture import hosts_by_rank, robot_numbers
from rlinf_core.config.diagnostics import visible
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.secrets import MASK, is_secret, mask_text, mask_urls
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.sections.group_rules import variable_paths
from rlinf_core.config.tree import MappingNode, ScalarNode, Span, find, place
from rlinf_core.errors import PlacementError
from rlinf_core.node.environment import (
    PATH_LISTS,
    ProcessEnvironment,
    process_environment,
    ray_interpreter,
)
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.strategy import Placement
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.topology import CLUSTER_LABEL, ClusterTopology


@dataclass(frozen=True)
class JobLayout:
    """The node and the units of every process.

    Attributes:
        placements: the placements by component, in the order of the file.
        resources: the resources by component, as in `accelerators 0-63`.
        mode: `collocated`, `disaggregated` or `hybrid`.
    """

    placements: Mapping[str, Sequence[Placement]]
    resources: Mapping[str, str]
    mode: str


def lay_out(
    job: SoundJob, command: str, file: str, component: str | None = None, arguments: Sequence[str] = ()
) -> JobLayout:
    """Return the layout of all components, or of a single one.

    Args:
        command, file, arguments: the user's command line (`arguments` follow the file), for an error's suggestion.

    Raises:
        PlacementError: the accelerators are unknown, or the component does not exist.
    """
    cluster = job.cluster if component is None else _only(job.cluster, component)
    _check_known(cluster, job.topology, ("rlinf", "inspect", command, file, *arguments))
    placement = ComponentPlacement(cluster, job.topology)
    placements = {name: placement.get_strategy(name).get_placement(job.topology) for name in placement.components}
    resources = {
        name: _resources(placement.get_hardware_ranks(name), cluster, name, job.topology)
        for name in placement.components
    }
    return JobLayout(placements, resources, str(placement.placement_mode))


def secret_texts(job: SoundJob) -> list[str]:
    """Return the values that references copied from secret keys, to be masked wherever they appear."""
    nodes = (find(job.tree, path) for path in job.secret)
    return [node.raw for node in nodes if isinstance(node, ScalarNode) and node.raw]


def masked(name: str, value: str, secrets: Iterable[str]) -> str:
    """Return a variable's value, masked for printing."""
    if value and is_secret(name, value):
        return MASK
    for secret in secrets:
        value = value.replace(secret, MASK)
    return mask_urls(value)


def _only(cluster: ClusterConfig, component: str) -> ClusterConfig:
    entry = cluster.component_placement.get(component)
    if entry is None:
        components = list(cluster.component_placement)
        listed = f"the components are {quoted(components)}" if components else "the file places no component"
        raise PlacementError(
            f"the file does not place a component `{component}`", help=did_you_mean(component, components) or listed
        )
    return cluster.model_copy(update={"component_placement": {component: entry}})


def _check_known(cluster: ClusterConfig, topology: ClusterTopology, asked: Sequence[str]) -> None:
    waiting: dict[str, list[str]] = {}
    for name, entry in cluster.component_placement.items():
        for label in entry.node_group or (CLUSTER_LABEL,):
            if topology.group(label).unit is None:
                waiting.setdefault(label, []).append(name)
    if not waiting:
        return
    components = dict.fromkeys(name for names in waiting.values() for name in names)
    import shlex

    needs_cluster = CLUSTER_LABEL in waiting
    assumptions = ("8",) if needs_cluster else tuple(f"{label}=8" for label in waiting)
    better = shlex.join(
        (*map(mask_text, asked), *(word for assumption in assumptions for word in ("--assume", assumption)))
    )
    where = "the nodes" if needs_cluster else quoted(waiting)
    raise PlacementError(
        f"the accelerators of {where} are unknown, so {quoted(components)} cannot be laid out",
        help=f"give the number per node: `{better}`,\n"
        "or probe the nodes with `--live`, or declare `accelerators: {per_node: 8}` in the node group"
        " (`per_node: 0` for one without GPUs)",
    )


def _resources(ranks: Sequence[int], cluster: ClusterConfig, name: str, topology: ClusterTopology) -> str:
    """Return the resources of a component, as in `accelerators 0-63`, `Franka 0-1` or `node 3`."""
    label = next(iter(cluster.component_placement[name].node_group), CLUSTER_LABEL)
    unit = topology.group(label).unit
    if unit is None:
        return format_ranks(ranks)
    return f"{unit.robot or unit.kind}{'s' if len(ranks) > 1 and not unit.robot else ''} {format_ranks(ranks)}"


SCHEMA: Final = "rlinf.env/1"
AT_LAUNCH = "<at launch>"
NODES_OWN = "<node's own>"
FROM_DRIVER = "<from the driver>"


class Layer(StrEnum):
    """The layer that sets a variable. An upper layer overrides the layers below it."""

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
        span: the place in the file that sets it; None for a variable of the runtime, or without the file.
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
        layer: the source of the path, in words.
        by_up: Ray's interpreter under `rlinf up`, if `path` is None and the file names one.
        span: the place in the file that sets it, or None.
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
    paths = variable_paths(tree, environment.path) if tree else ()
    spans = [place(tree, path) for path in paths] if tree else [None] * len(environment.variables)
    for (name, value), span in zip(environment.variables, spans, strict=False):
        layer = Layer.PATH_MERGE if name in PATH_LISTS else Layer.ENV_CONFIGS
        if layer is Layer.PATH_MERGE:
            value = f"{value}:{NODES_OWN}" if value else NODES_OWN
        variables[name] = ProcessVariable(name, value, layer, span, environment.group)
    return sorted(variables.values(), key=lambda variable: variable.name)


def env_text(job: SoundJob, component: str, placement: Placement) -> str:
    """Return a process's environment as readable text."""
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
    """Return the layer in words, as in `runtime` or `env_configs of a800`."""
    return f"{variable.layer} of {variable.group}" if variable.group else str(variable.layer)


def _origin(layer: str, span: Span | None) -> str:
    """Return the layer and its place, as in `runtime` or `env_configs of a800, job.yaml:24`."""
    return f"{layer}, {span.source.name}:{span.begin.line}" if span else layer


def _place_record(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {"file": span.source.name, "line": span.begin.line, "column": span.begin.column}
