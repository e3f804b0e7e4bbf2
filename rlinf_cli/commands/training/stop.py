"""`rlinf stop`: ends a run that is going on."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.options import LogPath, Quiet, Run, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH
from rlinf_core.runners.storage.run_status import RunStatus

if TYPE_CHECKING:
    from rlinf_core.errors import RunError
    from rlinf_core.runners.storage.run_folder import RunFolder

_LOOK_EVERY = 0.1
_FIRST_WORD = 2.0
# How long a process that was killed may take to be gone.
_DEATH_SECONDS = 10.0


def stop(
    run: Run = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Kill it; nothing of the step under way is kept. A run of a machine that is gone is given up.",
            show_default=False,
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long it may take to end.")
    ] = 60.0,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """End a run that is going on, and wait until it has ended.

    RUN is a run folder or its name in the folder of runs; by default the run that is going on; of several you are
    asked which. What it has saved stays, and the command that started it goes on from there with
    `runner.resume_dir=auto`.
    """
    from rlinf_cli.live.run_summary import shown
    from rlinf_cli.runs.run_lookup import find_run, outcome
    from rlinf_core.errors import RunError

    folder = find_run(run, log_path)
    if not folder.state.alive:
        status, _ = outcome(folder.state)
        if run is None:
            raise RunError("no run is going on", where=str(log_path), why=f"the last, {folder.path.name}, is {status}")
        console.result(f"{shown(folder.path)} is {status} already")
        return
    pid = folder.state.pid
    if not folder.state.here:
        # Whoever gives a run up says which: it may be going on.
        _give_up(folder, force=force and run is not None)
        return
    if force:
        _kill(folder)
    else:
        _ask(folder, timeout)
    console.result(f"{shown(folder.path)} is ended: process {pid}, after step {folder.refresh().step}")


app = command(stop)


def _give_up(folder: RunFolder, *, force: bool) -> None:
    """Nothing of another machine can be seen or killed here; a run whose machine is gone can be given up by force."""
    from rlinf_cli.live.run_summary import shown
    from rlinf_core.errors import RunError

    state = folder.state
    if not force:
        raise RunError(
            "the run is driven from another machine",
            where=str(folder.path),
            why=f"process {state.pid} on {state.host}",
            help=f"run the same command on {state.host}\nwhere that machine or container is gone for good,"
            f" `rlinf stop {shown(folder.path)} --force` gives the run up, so that it can be resumed",
        )
    folder.end(RunStatus.INTERRUPTED, f"given up by `rlinf stop --force`; process {state.pid} was on {state.host}")
    console.result(
        f"{shown(folder.path)} is given up after step {state.step}; nothing was killed: process {state.pid} was on"
        f" {state.host}"
    )


def _ask(folder: RunFolder, timeout: float) -> None:
    """SIGTERM, and a wait for the end."""
    from rlinf_core.errors import RunError

    _signal(folder, signal.SIGTERM)
    if not _gone(folder, timeout):
        raise RunError(
            f"the run did not end within {timeout:g} s",
            where=str(folder.path),
            why=f"process {folder.state.pid} is still there",
            help="wait longer with `--timeout SECONDS`, or kill it with `--force`",
        )


def _kill(folder: RunFolder) -> None:
    """SIGKILL, and what the process cannot write any more is written for it."""
    from rlinf_core.errors import RunError

    _signal(folder, signal.SIGKILL)
    if not _gone(folder, _DEATH_SECONDS):
        raise RunError(
            f"process {folder.state.pid} was killed and is still there",
            where=str(folder.path),
            why="it waits in the kernel for a device or a file system",
        )
    if folder.refresh().status == RunStatus.RUNNING:
        folder.end(RunStatus.INTERRUPTED, "killed by `rlinf stop --force`")


def _signal(folder: RunFolder, number: signal.Signals) -> None:
    try:
        os.kill(folder.state.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise _not_ours(folder) from None


def _not_ours(folder: RunFolder) -> RunError:
    from rlinf_core.errors import RunError

    return RunError(
        "the run is another user's",
        where=str(folder.path),
        why=f"process {folder.state.pid} takes no signal of yours",
        help="ask that user, or run the command as that user",
    )


def _gone(folder: RunFolder, seconds: float) -> bool:
    """Return whether the driver's process has ended within `seconds`; says that it waits."""
    from rlinf_core.node.node_processes import identity

    pid, start = folder.state.pid, folder.state.start
    began = time.monotonic()
    told = False
    while identity(pid) == start:
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        if not told and waited >= _FIRST_WORD:
            told = True
            console.message(f"waiting for process {pid} to end, at most {seconds:g} s")
        time.sleep(_LOOK_EVERY)
    return True
