"""The work of `rlinf ps`: list a job's processes and stacks, or attach the terminal to a breakpoint."""

from __future__ import annotations

import codecs
import os
import select
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.runs.active import Inspector, find_job, job_of
from rlinf_cli.runs.run_lookup import active_run, all_runs, run_at, run_of_words
from rlinf_core.cluster.engine import JobRecord
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.node.process_life import Presence, look
from rlinf_core.node.stacks import ProcessStacks, install_spy, py_spy
from rlinf_core.suggest import did_you_mean, quoted
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
from rlinf_core.supervision.lives import Hello
from rlinf_core.waiting import spell_seconds

_PART: Final = 65536


def attach_to(name: str, place: str, hello: Hello, command: str) -> None:
    """Connect standard input and output to the debugger of a process, until either end is closed.

    Args:
        name: the process.
        place: the place of its breakpoint.
        hello: its registration.
        command: the command that attaches to it, to be run on its machine.

    Raises:
        RunError: the process is on another machine, another terminal is attached, or the process has continued.
    """
    from rlinf_core.worker.debugging import GOES_ON, is_own_peer, socket_of

    process = hello.process
    if process is None or hello.info.unix_path is None or look(process) is not Presence.ALIVE:
        host = process.host if process is not None else ""
        raise RunError(
            f"`{name}` waits at a breakpoint of another machine, {place}",
            where=hello.node,
            why="a debugger attaches on the machine of its process, and no port is opened for it",
            help=f"run `{command}` on {host or hello.node}, as the same user",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(socket_of(hello.info.unix_path))
        except OSError as error:
            raise RunError(
                f"`{name}` takes no debugger at {place}",
                where=hello.node,
                why=f"another terminal is attached, or it has continued ({error.strerror})",
            ) from None
        if not is_own_peer(connection):
            raise RunError(f"the breakpoint of `{name}` is not this user's", where=hello.node)
        console.message(f"{name} at {place}: `c` continues it, `q` fails its call, Ctrl-D leaves it waiting")
        goes_on = _connected(connection, GOES_ON)
    console.message(f"{name} {'continues' if goes_on else 'still waits, or has ended'}")


def _connected(connection: socket.socket, mark: str) -> bool:
    """Forward bytes in both directions until the other end closes; return whether its output ended with `mark`."""
    standard_in = sys.stdin.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ended, text = False, ""
    while True:
        ready, _, _ = select.select([connection, *([] if ended else [standard_in])], [], [])
        if connection in ready:
            received = _received(connection)
            if not received:
                _print("\n")
                return text.endswith(mark)
            text = decoder.decode(received)
            _print(text.removesuffix(mark))
        elif standard_in in ready:
            typed = os.read(standard_in, _PART)
            ended = not typed
            # If the other end is closed, the next read finds that out.
            with suppress(ConnectionError):
                connection.sendall(typed) if typed else connection.shutdown(socket.SHUT_WR)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_PART)
    except ConnectionError:
        return b""


def _print(text: str) -> None:
    # A worker's output could contain control sequences.
    sys.stdout.write("".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text))
    sys.stdout.flush()


def components_of(config_file: Path) -> dict[str, str]:
    """Return the group names of a run by component, from its `config.yaml`; empty if the file cannot be read."""
    from rlinf_cli.why.facts import read_config

    suffix = ".group_name"
    values = read_config(config_file, [])
    return {path.removesuffix(suffix): str(value) for path, value in values.items() if path.endswith(suffix)}


def chosen_processes(names: Iterable[str], words: Sequence[str], groups: Mapping[str, str], where: str) -> list[str]:
    """Return the processes named by `words`, as in `EnvGroup:0`, `EnvGroup` or `env:0`; all processes without words.

    Args:
        names: the processes.
        words: the words of the command line.
        groups: the groups by component.
        where: the job, for errors.

    Raises:
        RunError: a word names no process.
    """
    known = list(names)
    if not words:
        return known
    chosen: dict[str, None] = {}
    for word in words:
        component, colon, ranks = word.partition(":")
        spellings = {word, f"{groups.get(component, component)}{colon}{ranks}"}
        matching = [name for name in known if any(name == one or name.startswith(f"{one}:") for one in spellings)]
        if not matching:
            help = did_you_mean(word, known) or f"its processes: {quoted(known[:20])}"
            raise RunError(f"the job has no process `{word}`", where=where, help=help)
        chosen.update(dict.fromkeys(matching))
    return list(chosen)


WORKERS_SCHEMA = "rlinf.workers/1"


def workers_record(job: JobSnapshot, names: Collection[str]) -> dict[str, Any]:
    """Return the record; `since` counts seconds until now, `waits_for` lists addresses and `channel NAME`s."""
    workers = [
        {**asdict(worker), "device": worker.device or "cpu", "since": _rounded(worker.since)}
        for worker in views(job)
        if worker.name in names
    ]
    return {"schema": WORKERS_SCHEMA, "job": job.job, "workers": workers}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def workers_text(job: JobSnapshot, names: Collection[str]) -> str:
    """Return a line for each named process."""
    rows = [row for worker in views(job) if worker.name in names for row in _rows(worker)]
    table = console.table(["WORKER", "NODE", "PID", "DEVICE", "SINCE", "DOES"], rows, right=(2, 4))
    return f"job {job.job}\n{table}"


def _rows(worker: WorkerView) -> Iterator[list[str]]:
    """Yield the line of a process, and a line for each thing that it holds."""
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
    """Return the activity, with the awaited peers that it does not name already."""
    unnamed = [name for name in worker.waits_for if name.removeprefix("channel ") not in worker.doing]
    if not unnamed:
        return worker.doing
    listed = ", ".join(unnamed[:3]) + (f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else "")
    return f"{worker.doing} ({listed})"


SCHEMA: Final = "rlinf.debug/1"
_INDENT: Final = "  "


def stacks_record(job: str, processes: Sequence[JobProcess]) -> dict[str, Any]:
    """Return the record; `parent` is the pid of the parent process, `since` counts seconds until now."""
    rows: list[dict[str, Any]] = []
    for process in processes:
        view = process.view
        doing = {"state": view.state, "doing": view.doing, "since": _rounded(view.since)}
        rows.append(_stacks_row(view, process, {"pid": view.pid, "parent": None, "command": "", **doing}))
        for child in process.children:
            of_child = {"pid": child.pid, "parent": child.parent, "command": child.command}
            rows.append(_stacks_row(view, child, {**of_child, "state": "", "doing": "", "since": None}))
    return {"schema": SCHEMA, "job": job, "complete": all(one.complete for one in processes), "processes": rows}


def _stacks_row(view: WorkerView, of: JobProcess | ProcessStacks, own: Mapping[str, Any]) -> dict[str, Any]:
    place = {"name": view.name, "node": view.node, "node_rank": view.node_rank}
    return {**place, **own, "source": of.source, "stacks": of.stacks, "reason": of.reason}


def stacks_text(processes: Sequence[JobProcess]) -> str:
    """Return a paragraph for each process; its children are listed below it."""
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
    """Return the activities of processes, or their stacks; None after a debugging session.

    Args:
        words: a run, and some of its processes.
        job: the name of a job without a run folder.
        stacks: whether to return stacks.
        attach: whether to debug a process that waits at a breakpoint; other processes show their stacks.
        native: whether to include frames of native code.

    Raises:
        RLinfError: the run, job or process does not exist.
    """
    if native and py_spy() is None:
        raise ConfigError("`--native` needs py-spy, which is not installed", help=install_spy())
    record, words, groups = _meant(words, job)
    with Inspector(record) as inspector:
        snapshot = inspector.snapshot(stacks=stacks or attach)
        known = [*(name for name in snapshot.peers if name not in snapshot.workers), *snapshot.workers]
        names = chosen_processes(known, words, groups, f"job {record.job}")
        if not (stacks or attach):
            return Result(lambda: workers_text(snapshot, names), lambda: workers_record(snapshot, names))
        if any(name in snapshot.peers and name not in snapshot.answers for name in names):
            # On a busy machine a process may answer late. Only a process that never answers is read from outside.
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
    """Return the job, the words that name its processes, and its groups by component."""
    of_run = job is None and (active_run() is not None or any(run_at(word) is not None for word in words))
    if not of_run and (job is not None or not words or not all_runs()):
        # The job is a program without a run folder.
        return find_job(job), list(words), {}
    folder, rest = run_of_words(
        words, lambda run: [name for pair in components_of(run.config_file).items() for name in pair]
    )
    return job_of(folder), rest, components_of(folder.config_file)
