"""The stacks of a job's processes as text, and as the contract `rlinf.debug/1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rlinf_core.node.stacks.process_stacks import ProcessStacks
from rlinf_core.supervision.job_view import ITSELF, JobProcess
from rlinf_core.waiting import spell_seconds

SCHEMA: Final = "rlinf.debug/1"
_INDENT: Final = "  "


def stacks_record(job: str, processes: Sequence[JobProcess]) -> dict[str, Any]:
    """Return the record: `parent` is the pid of the process that started one, `since` in seconds up to now."""
    rows: list[dict[str, Any]] = []
    for process in processes:
        view = process.view
        rows.append(
            {
                "name": view.name,
                "node": view.node,
                "node_rank": view.node_rank,
                "pid": view.pid,
                "parent": None,
                "command": "",
                "state": view.state,
                "doing": view.doing,
                "since": None if view.since is None else round(view.since, 3),
                "source": process.source,
                "stacks": process.stacks,
                "reason": process.reason,
            }
        )
        rows += [_child_row(process, child) for child in process.children]
    return {"schema": SCHEMA, "job": job, "complete": all(one.complete for one in processes), "processes": rows}


def _child_row(process: JobProcess, child: ProcessStacks) -> dict[str, Any]:
    return {
        "name": process.view.name,
        "node": process.view.node,
        "node_rank": process.view.node_rank,
        "pid": child.pid,
        "parent": child.parent,
        "command": child.command,
        "state": "",
        "doing": "",
        "since": None,
        "source": child.source,
        "stacks": child.stacks,
        "reason": child.reason,
    }


def stacks_text(processes: Sequence[JobProcess]) -> str:
    """Return a paragraph for each process, those that it started below it."""
    return "\n\n".join(_paragraph(process) for process in processes)


def _paragraph(process: JobProcess) -> str:
    view = process.view
    place = ", ".join(part for part in (view.node, f"pid {view.pid}" if view.pid is not None else "") if part)
    since = f", {spell_seconds(view.since)}" if view.since is not None and view.state == "ready" else ""
    head = f"{view.name} ({place}): {view.doing}{since}" if place else f"{view.name}: {view.doing}{since}"
    parts = [head, *_body(process.source, process.stacks, process.reason)]
    for child in process.children:
        parts.append(f"{view.name}, its process {child.pid} ({child.command or 'unknown'})")
        parts += _body(child.source, child.stacks, child.reason)
    return "\n".join(parts)


def _body(source: str, stacks: str, reason: str) -> list[str]:
    if not stacks:
        return [f"{_INDENT}no stacks: {reason}"]
    by = [] if source in ("", ITSELF) else [f"{_INDENT}read by {'a signal handler' if source == 'signal' else source}"]
    missing = [f"{_INDENT}no native stacks: {reason}"] if reason else []
    return [*by, *missing, *(_INDENT + line for line in stacks.splitlines())]
