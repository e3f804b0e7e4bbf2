"""The environment of one process: its interpreter and every variable, each with its source."""

from __future__ import annotations

from typing import Any

from rlinf_cli.console import console
from rlinf_cli.file.job_file import SoundJob
from rlinf_cli.placement.job_layout import masked, secret_texts
from rlinf_cli.placement.placement_picture import hosts_by_rank, robot_numbers
from rlinf_cli.placement.process_variables import ProcessVariable, process_interpreter, process_variables
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.render import visible
from rlinf_core.config.source import Span
from rlinf_core.placement.strategy import Placement

SCHEMA = "rlinf.env/1"


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
            _origin(_layer(variable), variable.span),
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
        "python_place": _place(python.span),
        "variables": [
            {
                "name": variable.name,
                "value": masked(variable.name, variable.value, secrets),
                "layer": str(variable.layer),
                "node_group": variable.group,
                "place": _place(variable.span),
            }
            for variable in process_variables(job.cluster, placement, job.tree)
        ],
    }


def _layer(variable: ProcessVariable) -> str:
    """Return `runtime`, `env_configs of a800`."""
    return f"{variable.layer} of {variable.group}" if variable.group else str(variable.layer)


def _origin(layer: str, span: Span | None) -> str:
    """Return `runtime`, `env_configs of a800, job.yaml:24`."""
    return f"{layer}, {span.source.name}:{span.begin.line}" if span else layer


def _place(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {"file": span.source.name, "line": span.begin.line, "column": span.begin.column}
