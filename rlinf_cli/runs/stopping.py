"""Stopping an active run."""

from __future__ import annotations

import select
import shlex
import signal

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.runs.run_lookup import find_run, runs_folder
from rlinf_core.errors import RunError
from rlinf_core.node import process_identity
from rlinf_core.process import proc
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus

_FIRST_WORD = 2.0
# About 30 years; `select` refuses ten times as long.
_LONGEST = 1e9


def stop_run(run: str | None, timeout: float, *, force: bool) -> Result:
    """End an active run, and return a description of what was done.

    Args:
        run: the folder or name of the run; None for the active run.
        timeout: seconds to wait for its end.
        force: whether to kill the run, or to release it if its process cannot be seen.

    Raises:
        RunError: the run is not active, or it did not end.
    """
    folder = find_run(run)
    state = folder.state
    if not state.going_on:
        status, _ = state.outcome
        if run is None:
            why = f"the last, {folder.path.name}, is {status}"
            raise RunError("no run is active", where=str(runs_folder()), why=why)
        return Result(f"{shown(folder.path)} is already {status}")
    if not state.alive:
        # A run is only released if the user names it, because it may still be active.
        return _give_up(folder, force=force and run is not None)
    if force:
        _kill(folder, timeout)
    else:
        _ask(folder, timeout)
    return Result(f"{shown(folder.path)} has ended: process {state.pid}, after step {folder.refresh().step}")


def _give_up(folder: RunFolder, *, force: bool) -> Result:
    """Release a run whose process is not visible from here: mark it as interrupted, without killing a process."""
    process = folder.state.process
    if not force:
        raise RunError(
            "it is not known here whether the run is active",
            where=str(folder.path),
            why=f"its driver was {process}, on another machine or container, or its identity was not recorded",
            help=f"run the same command on {process.host or 'the machine of the driver'}\nif that machine or"
            f" container is gone for good, `rlinf stop {shlex.quote(shown(folder.path))} --force` releases the run, so"
            " that it can be resumed",
        )
    folder.end(RunStatus.INTERRUPTED, f"released by `rlinf stop --force`; its driver was {process}")
    return Result(
        f"{shown(folder.path)} is released after step {folder.state.step}; nothing was killed: its driver was {process}"
    )


def _ask(folder: RunFolder, timeout: float) -> None:
    """Send SIGTERM to the driver, and wait for its end."""
    pid = folder.state.pid
    if proc.stat(pid).is_stopped:
        raise RunError(
            "the run cannot end: its driver is stopped, as by SIGSTOP or Ctrl-Z",
            where=str(folder.path),
            help=f"`kill -CONT {pid}` lets it go on, so that this command ends it; or kill it with `--force`",
        )
    if not _ended_by(folder, signal.SIGTERM, timeout):
        raise RunError(
            f"the run did not end within {timeout:g} s",
            where=str(folder.path),
            why=f"process {pid} is still running",
            help="wait longer with `--timeout SECONDS`, or kill it with `--force`",
        )


def _kill(folder: RunFolder, timeout: float) -> None:
    """Send SIGKILL to the driver, and write the end status in its place."""
    if not _ended_by(folder, signal.SIGKILL, max(timeout, _FIRST_WORD)):
        raise RunError(
            f"process {folder.state.pid} was killed and is still present",
            where=str(folder.path),
            why="it is blocked in the kernel, on a device or a file system",
        )
    if folder.refresh().status == RunStatus.RUNNING:
        folder.end(RunStatus.INTERRUPTED, "killed by `rlinf stop --force`")


def _ended_by(folder: RunFolder, number: signal.Signals, seconds: float) -> bool:
    """Send a signal to a run's driver process, and no other; return whether it ends within `seconds`."""
    process = folder.state.process
    try:
        # The driver has the folder open, not a link to it.
        with process_identity.held(process, folder.path.resolve()) as handle:
            process_identity.send(handle, number)
            return _gone(handle, process.pid, seconds)
    except ProcessLookupError:
        return True
    except process_identity.UnprovenProcessError as error:
        raise RunError(
            "no signal was sent: the process may not be this run's driver",
            where=str(folder.path),
            why=str(error),
            help=f"inspect it with `ps {process.pid}`, and end it with `kill {process.pid}`",
        ) from None
    except PermissionError:
        raise _not_ours(folder) from None
    except OSError as error:
        raise RunError(
            "the process of the run cannot be signalled",
            where=str(folder.path),
            why=error.strerror or str(error),
            help=f"inspect it with `ps {process.pid}`, and end it with `kill {process.pid}`",
        ) from None


def _not_ours(folder: RunFolder) -> RunError:
    return RunError(
        "the run belongs to another user",
        where=str(folder.path),
        why=f"you may not signal process {folder.state.pid}",
        help="ask that user, or run this command as that user",
    )


def _gone(handle: int, pid: int, seconds: float) -> bool:
    """Return whether the process of a handle ends within `seconds`; print a message while waiting."""
    first = min(_FIRST_WORD, seconds)
    # A pidfd becomes readable when the process has ended.
    if select.select([handle], [], [], first)[0]:
        return True
    if seconds > first:
        console.message(f"waiting for process {pid} to end, at most {seconds:g} s")
        return bool(select.select([handle], [], [], min(seconds - first, _LONGEST))[0])
    return False
