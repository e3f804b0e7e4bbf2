"""`rlinf stop`: ends a run that is going on."""

from __future__ import annotations

import select
import signal
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
    state = folder.state
    if not state.going_on:
        status, _ = outcome(state)
        if run is None:
            raise RunError("no run is going on", where=str(log_path), why=f"the last, {folder.path.name}, is {status}")
        console.result(f"{shown(folder.path)} is {status} already")
        return
    if not state.alive:
        # Whoever gives a run up says which: it may be going on.
        _give_up(folder, force=force and run is not None)
        return
    if force:
        _kill(folder)
    else:
        _ask(folder, timeout)
    console.result(f"{shown(folder.path)} is ended: process {state.pid}, after step {folder.refresh().step}")


app = command(stop)


def _give_up(folder: RunFolder, *, force: bool) -> None:
    """Give up by force a run whose process cannot be seen from here: it is told to nobody, and nothing is killed."""
    from rlinf_cli.live.run_summary import shown
    from rlinf_core.errors import RunError

    process = folder.state.process
    if not force:
        raise RunError(
            "it cannot be told from here whether the run is going on",
            where=str(folder.path),
            why=f"it was driven by {process}, which is another machine or container, or is not known well enough",
            help=f"run the same command there, on {process.host or 'the machine that drives it'}\nwhere that machine or"
            f" container is gone for good, `rlinf stop {shown(folder.path)} --force` gives the run up, so that it can"
            " be resumed",
        )
    folder.end(RunStatus.INTERRUPTED, f"given up by `rlinf stop --force`; it was driven by {process}")
    console.result(
        f"{shown(folder.path)} is given up after step {folder.state.step}; nothing was killed: it was driven by"
        f" {process}"
    )


def _ask(folder: RunFolder, timeout: float) -> None:
    """SIGTERM, and a wait for the end."""
    from rlinf_core.errors import RunError

    if not _ended_by(folder, signal.SIGTERM, timeout):
        raise RunError(
            f"the run did not end within {timeout:g} s",
            where=str(folder.path),
            why=f"process {folder.state.pid} is still there",
            help="wait longer with `--timeout SECONDS`, or kill it with `--force`",
        )


def _kill(folder: RunFolder) -> None:
    """SIGKILL, and what the process cannot write any more is written for it."""
    from rlinf_core.errors import RunError

    if not _ended_by(folder, signal.SIGKILL, _DEATH_SECONDS):
        raise RunError(
            f"process {folder.state.pid} was killed and is still there",
            where=str(folder.path),
            why="it waits in the kernel for a device or a file system",
        )
    if folder.refresh().status == RunStatus.RUNNING:
        folder.end(RunStatus.INTERRUPTED, "killed by `rlinf stop --force`")


def _ended_by(folder: RunFolder, number: signal.Signals, seconds: float) -> bool:
    """Send a signal to the process that drives a run, and to no other; return whether it ends within `seconds`."""
    from rlinf_core.errors import RunError
    from rlinf_core.node.process_identity import UnprovenProcessError, held, send

    process = folder.state.process
    try:
        with held(process, folder.path) as handle:
            send(handle, number)
            return _gone(handle, process.pid, seconds)
    except ProcessLookupError:
        return True
    except UnprovenProcessError as error:
        raise RunError(
            "nothing was ended: it is not certain that the process is the one that drives this run",
            where=str(folder.path),
            why=str(error),
            help=f"look at it with `ps {process.pid}`; `kill {process.pid}` ends it",
        ) from None
    except PermissionError:
        raise _not_ours(folder) from None
    except OSError as error:
        raise RunError(
            "the process of the run cannot be signalled",
            where=str(folder.path),
            why=error.strerror or str(error),
            help=f"look at it with `ps {process.pid}`; `kill {process.pid}` ends it",
        ) from None


def _not_ours(folder: RunFolder) -> RunError:
    from rlinf_core.errors import RunError

    return RunError(
        "the run is another user's",
        where=str(folder.path),
        why=f"process {folder.state.pid} takes no signal of yours",
        help="ask that user, or run the command as that user",
    )


def _gone(handle: int, pid: int, seconds: float) -> bool:
    """Return whether the process of a handle has ended within `seconds`; says that it waits."""
    first = min(_FIRST_WORD, seconds)
    # The handle of a process can be read when the process has ended.
    if select.select([handle], [], [], first)[0]:
        return True
    if seconds > first:
        console.message(f"waiting for process {pid} to end, at most {seconds:g} s")
        return bool(select.select([handle], [], [], seconds - first)[0])
    return False
