"""The environment of one process: its interpreter and every variable, each with what set it."""

from __future__ import annotations

from typing import Any

from rlinf_cli import console
from rlinf_cli.files import SoundJob
from rlinf_cli.layout import masked, secret_texts
from rlinf_cli.render.placement_picture import hosts_by_rank
from rlinf_core.config.places import place
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.render import visible
from rlinf_core.config.source import Span
from rlinf_core.placement.environment import node_environment
from rlinf_core.placement.explain import EnvVar, process_environment
from rlinf_core.placement.placement import Placement

SCHEMA = "rlinf.env/1"


def env_text(job: SoundJob, component: str, placement: Placement) -> str:
    """Return the environment for people."""
    node = placement.cluster_node_rank
    host = hosts_by_rank(job.cluster).get(node)
    where = f"node {node} ({host})" if host else f"node {node}"
    held = ""
    if placement.local_hardware_ranks:
        held = f", {placement.hardware_type} {format_ranks(placement.local_hardware_ranks)}"
    environment = node_environment(job.cluster, node)
    span = _interpreter_span(job, node)
    python = "python: the node's own"
    if environment.interpreter:
        python = console.table(("python", "set by"), [(environment.interpreter, str(span))])
    secrets = secret_texts(job)
    rows = [
        (each.name, visible(masked(each.name, each.value, secrets)) or '""', _origin(each))
        for each in process_environment(job.cluster, placement, job.tree, environment)
    ]
    head = console.style(f"{component}:{placement.rank}", "bold")
    return "\n".join(
        [
            f"{head} on {where}{held}",
            "",
            python,
            "",
            console.table(("variable", "value", "set by"), rows),
        ]
    )


def env_record(job: SoundJob, component: str, placement: Placement) -> dict[str, Any]:
    """Return the contract `rlinf.env/1`."""
    environment = node_environment(job.cluster, placement.cluster_node_rank)
    secrets = secret_texts(job)
    return {
        "schema": SCHEMA,
        "component": component,
        "rank": placement.rank,
        "node_rank": placement.cluster_node_rank,
        "python": environment.interpreter,
        "python_place": _place(_interpreter_span(job, placement.cluster_node_rank)),
        "variables": [
            {
                "name": each.name,
                "value": masked(each.name, each.value, secrets),
                "layer": str(each.layer),
                "node_group": each.group,
                "place": _place(each.span),
            }
            for each in process_environment(job.cluster, placement, job.tree, environment)
        ],
    }


def _interpreter_span(job: SoundJob, node: int) -> Span | None:
    path = node_environment(job.cluster, node).interpreter_path
    return place(job.tree, path) if path else None


def _origin(variable: EnvVar) -> str:
    """Return `runtime`, `env_configs of a800, job.yaml:24`."""
    words = str(variable.layer)
    if variable.group:
        words += f" of {variable.group}"
    return f"{words}, {variable.span.source.name}:{variable.span.begin.line}" if variable.span else words


def _place(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {"file": span.source.name, "line": span.begin.line, "column": span.begin.column}
