"""The answer of `rlinf ps`: the processes of a job, their stacks, and a terminal at a breakpoint."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from rlinf_cli.cluster.jobs import Inspector, find_job, job_of
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.debug.attaching import attach as attach_to
from rlinf_cli.debug.attaching import chosen_processes, components_of
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.runs.run_lookup import active_run, all_runs, run_at, run_of_words
from rlinf_core.cluster.driver_folder import JobRecord
from rlinf_core.errors import ConfigError
from rlinf_core.node.stacks import ProcessStacks, install_spy, py_spy
from rlinf_core.supervision.job_view import (
    ITSELF,
    JobProcess,
    JobSnapshot,
    WorkerView,
    answers_of_both,
    job_processes,
    views,
    waits_at_breakpoint,
)
from rlinf_core.waiting import spell_seconds

WORKERS_SCHEMA = "rlinf.workers/1"


def workers_record(job: JobSnapshot, names: Collection[str]) -> dict[str, Any]:
    """Return `since` is in seconds up to now; `waits_for` holds addresses and, as `channel NAME`, channels."""
    return {
        "schema": WORKERS_SCHEMA,
        "job": job.job,
        "workers": [
            {
                "name": worker.name,
                "node": worker.node,
                "node_rank": worker.node_rank,
                "pid": worker.pid,
                "device": worker.device or "cpu",
                "state": worker.state,
                "doing": worker.doing,
                "since": None if worker.since is None else round(worker.since, 3),
                "waits_for": list(worker.waits_for),
                "holds": list(worker.holds),
                "stacks": worker.stacks,
            }
            for worker in views(job)
            if worker.name in names
        ],
    }


def workers_text(job: JobSnapshot, names: Collection[str]) -> str:
    """Return a line for each process of these names."""
    rows = [row for worker in views(job) if worker.name in names for row in _rows(worker)]
    table = console.table(["WORKER", "NODE", "PID", "DEVICE", "SINCE", "DOES"], rows, right=(2, 4))
    return f"job {job.job}\n{table}"


def _rows(worker: WorkerView) -> Iterator[list[str]]:
    """Yield the line of a process, and those of what it holds."""
    yield [
        worker.name,
        "" if worker.node_rank is None else str(worker.node_rank),
        "" if worker.pid is None else str(worker.pid),
        worker.device or "cpu",
        "" if worker.since is None else spell_seconds(worker.since),
        _does(worker),
    ]
    for line in worker.holds:
        yield ["", "", "", "", "", f"{_INDENT}{line}"]


def _does(worker: WorkerView) -> str:
    """Return the activity, with the awaited peers unless it names them already."""
    unnamed = [name for name in worker.waits_for if name.removeprefix("channel ") not in worker.doing]
    if not unnamed:
        return worker.doing
    listed = ", ".join(unnamed[:3]) + (f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else "")
    return f"{worker.doing} ({listed})"


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


def processes_of(words: Sequence[str], job: str | None, *, stacks: bool, attach: bool, native: bool) -> Result | None:
    """Return what processes do, or their stacks; None after a terminal was attached to one.

    Args:
        words: a run, and processes of it.
        job: the name of a job without a run folder.
        stacks: whether their stacks are wanted.
        attach: whether a process that waits at a breakpoint is to be debugged; others show their stacks.
        native: whether frames of native code are shown, too.

    Raises:
        RLinfError: there is no such run, job or process.
    """
    if native and py_spy() is None:
        raise ConfigError("`--native` needs py-spy, which is not installed", help=install_spy())
    record, words, groups = _meant(words, job)
    with Inspector(record) as inspector:
        snapshot = inspector.snapshot(stacks=stacks or attach)
        names = chosen_processes(_names(snapshot), words, groups, f"job {record.job}")
        if not (stacks or attach):
            return Result(lambda: workers_text(snapshot, names), lambda: workers_record(snapshot, names))
        if any(name in snapshot.peers and name not in snapshot.answers for name in names):
            # On a busy machine one may answer late; only those that answer nothing are read from outside.
            snapshot = answers_of_both(snapshot, inspector.snapshot(stacks=True))
        place = waits_at_breakpoint(snapshot, names[0]) if len(names) == 1 else None
        if attach and words and place is not None and not (stacks or console.verbosity.json):
            attach_to(names[0], place, snapshot.peers[names[0]], f"rlinf {' '.join(sys.argv[1:])}")
            return None
        shown = job_processes(snapshot, names, native=native, remotely=inspector.read_stacks)
    complete = all(process.complete for process in shown)
    return Result(
        lambda: stacks_text(shown),
        lambda: stacks_record(snapshot.job, shown),
        ExitCode.OK if complete else ExitCode.FAILED,
    )


def _meant(words: Sequence[str], job: str | None) -> tuple[JobRecord, list[str], Mapping[str, str]]:
    """Return a job, the words that name processes of it, and its groups by component."""
    of_run = job is None and (active_run() is not None or any(run_at(word) is not None for word in words))
    if not of_run and (job is not None or not words or not all_runs()):
        # A program without a run folder.
        return find_job(job), list(words), {}
    folder, rest = run_of_words(
        words, lambda run: [name for pair in components_of(run.config_file).items() for name in pair]
    )
    return job_of(folder), rest, components_of(folder.config_file)


def _names(snapshot: JobSnapshot) -> list[str]:
    return [*(name for name in snapshot.peers if name not in snapshot.workers), *snapshot.workers]
