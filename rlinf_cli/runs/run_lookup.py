"""The runs of a folder: the one that a command is about, all of them, and the outcome of each."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from rlinf_cli.console import console
from rlinf_core.node.process_identity import Presence
from rlinf_core.runners.storage.run_status import RunStatus

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder
    from rlinf_core.runners.storage.run_state import RunState, UnreadableRun

DEFAULT_LOG_PATH = Path("runs")
# The process is gone and wrote no end.
_VANISHED: Final = "its process ended without a word: it was killed, or its machine went down"
_MOST_UNREADABLE: Final = 5


def find_run(run: str | None, log_path: Path, *, ask: bool = True) -> RunFolder:
    """Return the folder of a run.

    Args:
        run: its path, or its name in `log_path`; None for the one that is running, or the last where none is. Where
            several are running the person is asked.
        ask: whether that may be done; otherwise it is the youngest.

    Raises:
        RunError: there is none.
        typer.BadParameter: several are running, and there is no terminal to ask at.
    """
    from rlinf_core.errors import RunError

    if run is not None:
        return _named(run, log_path)
    folders = all_runs(log_path)
    if ask:
        warn_of_unreadable(log_path)
    running = [folder for folder in folders if folder.state.alive]
    # One that only may be going on, elsewhere, hides none that does here.
    running = running or [folder for folder in folders if folder.state.going_on]
    if not folders:
        raise RunError(
            "there is no run",
            where=str(log_path),
            help="name the run folder, or where run folders are with `--log-path`; `rlinf train` makes them",
        )
    running.sort(key=_age)
    if len(running) > 1 and ask:
        return _asked(running)
    return max(running or folders, key=_age)


def _age(folder: RunFolder) -> tuple[float, str]:
    return folder.state.created, folder.path.name


def all_runs(log_path: Path) -> list[RunFolder]:
    """Return the run folders in `log_path`, by name. Those that cannot be read are left out; see `unreadable`."""
    from rlinf_core.runners.storage.run_folder import RunFolder
    from rlinf_core.runners.storage.run_state import runs_in

    return [RunFolder(path, state) for path, state in runs_in(log_path.absolute())]


def unreadable(log_path: Path) -> list[UnreadableRun]:
    """Return the folders in `log_path` whose `run.json` cannot be used."""
    from rlinf_core.runners.storage.run_state import unreadable_runs

    return unreadable_runs(log_path.absolute())


def warn_of_unreadable(log_path: Path) -> None:
    """Name the runs in `log_path` that cannot be read, each with the reason."""
    from rlinf_cli.live.run_summary import shown

    broken = unreadable(log_path)
    for each in broken[:_MOST_UNREADABLE]:
        console.warn(f"{shown(each.path)} is left out: {each.why}")
    if len(broken) > _MOST_UNREADABLE:
        console.warn(f"{len(broken) - _MOST_UNREADABLE} further folders cannot be read either")


def _asked(running: list[RunFolder]) -> RunFolder:
    """Return the one of several live runs that the person chooses."""
    from rlinf_cli.live.run_summary import shown

    names = [shown(folder.path) for folder in running]
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(
            f"{len(running)} runs are going on: name one of {', '.join(names)}", param_hint="'RUN'"
        )
    for number, (name, folder) in enumerate(zip(names, running, strict=True), start=1):
        state = folder.state
        started = time.strftime("%H:%M:%S", time.localtime(state.created))
        console.error(f"  {number}  {name}  started {started}, step {state.step}, process {state.pid}")
    while True:
        choice: int = typer.prompt("which run", type=int, err=True)
        if 1 <= choice <= len(running):
            return running[choice - 1]
        console.error(f"a number from 1 to {len(running)}")


def _named(run: str, log_path: Path) -> RunFolder:
    from rlinf_core.errors import RunError
    from rlinf_core.runners.storage.run_folder import RunFolder
    from rlinf_core.runners.storage.run_state import STATE
    from rlinf_core.suggest import did_you_mean

    for path in (Path(run), log_path / run):
        if os.path.lexists(path / STATE):
            return RunFolder.open(path)
    names = [folder.path.name for folder in all_runs(log_path)]
    raise RunError(
        f"there is no run `{run}`",
        where=str(log_path),
        help=did_you_mean(run, names) or "name the run folder; `--log-path` says where run folders are",
    )


def outcome(state: RunState) -> tuple[str, str]:
    """Return the status of a run and the reason, also where its process could not write them any more."""
    if state.status != RunStatus.RUNNING:
        return state.status, state.reason
    match state.presence:
        case Presence.ALIVE:
            return RunStatus.RUNNING, state.reason
        case Presence.UNKNOWN:
            return RunStatus.UNKNOWN, f"it was driven by {state.process}, which cannot be seen from here"
        case Presence.GONE:
            return outcome(state.as_before()) if state.earlier is not None else (RunStatus.FAILED, _VANISHED)
