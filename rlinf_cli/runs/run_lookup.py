"""Lookup of runs in the folder of runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from rlinf_cli import console
from rlinf_cli.console import shown
from rlinf_core.config.shipped import meant_config
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.suggest import did_you_mean, quoted

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder
    from rlinf_core.runners.storage.run_state import UnreadableRun

_MOST_UNREADABLE: Final = 5
# The file that makes a folder that of a sweep.
SWEEP: Final = "sweep.json"
# The folder of runs from the command line, if any.
named_folder: list[Path] = []


def choose_runs_folder(folder: str | None) -> None:
    """Look for runs in `folder` from now on; None for the folder of RLINF_RUNS, by default `runs`.

    Raises:
        ConfigError: `folder` is empty.
    """
    if folder == "":
        raise ConfigError("`--runs-dir` needs a folder")
    named_folder[:] = [] if folder is None else [_expanded(folder)]


def runs_folder() -> Path:
    """Return the folder in which commands look for runs, normally the `runner.logger.log_path` of their files."""
    from rlinf_core import env_vars

    return named_folder[0] if named_folder else _expanded(env_vars.RUNS.get())


def _expanded(folder: str) -> Path:
    # As in files: no shell expands `~` after the `=` of an argument.
    return Path(os.path.expanduser(folder))


def find_run(run: str | None, *, ask: bool = True) -> RunFolder:
    """Return the folder of a run.

    Args:
        run: the path of the run, or its name in the folder of runs; None for the running one, else the last one. If
            several are running, the user is asked.
        ask: whether to ask; otherwise the newest is taken.

    Raises:
        RunError: the run does not exist.
        typer.BadParameter: several runs are running, and there is no terminal to ask on.
    """
    if run is not None:
        return _named(run)
    folders = all_runs()
    if ask:
        warn_of_unreadable()
    running = [folder for folder in folders if folder.state.alive]
    # A run that may be running elsewhere must not hide one that is running here.
    running = running or [folder for folder in folders if folder.state.going_on]
    if not folders:
        raise RunError(
            "there is no run",
            where=str(runs_folder()),
            help="name the run folder, or the folder of the runs with `--runs-dir`; `rlinf train` creates runs",
        )
    running.sort(key=_age)
    if len(running) > 1 and ask:
        return _asked(running)
    return max(running or folders, key=_age)


def find_runs(run: str) -> list[RunFolder]:
    """Return the run that `find_run` finds or, for a folder of runs, its runs; of a sweep, the newest of each point.

    Raises:
        RunError: the run does not exist.
    """
    from rlinf_core.runners.storage.run_state import STATE

    for path in (Path(run), runs_folder() / run):
        if not path.is_dir() or os.path.lexists(path / STATE):
            continue
        runs = sorted(all_runs(path), key=_age)
        warn_of_unreadable(path)
        if (path / SWEEP).exists():
            runs = list({folder.state.experiment: folder for folder in runs}.values())
        if runs:
            return sorted(runs, key=lambda folder: folder.path.name)
        raise RunError("there is no run in the folder", where=str(path))
    return [find_run(run)]


def active_run() -> RunFolder | None:
    """Return the newest run that is active, or may be active on another machine; None without such a run."""
    return max((folder for folder in all_runs() if folder.state.going_on), key=_age, default=None)


def run_of_words(
    words: Sequence[str], components_of: Callable[[RunFolder], Collection[str]]
) -> tuple[RunFolder, list[str]]:
    """Return the run that a word names, and the words that name its processes, as in `actor` or `env:0`.

    If no word names a run, the words name processes of the active run or, without one, of the last run.

    Args:
        words: RUN, COMPONENT and COMPONENT:RANK.
        components_of: returns the components of a run.

    Raises:
        RunError: a word names neither a run nor a component.
    """
    for at, word in enumerate(words):
        if not word.startswith(":") and (folder := run_at(word)) is not None:
            return folder, [*words[:at], *words[at + 1 :]]
    if not words:
        return find_run(None), []
    runs = [folder.path.name for folder in all_runs()]
    meant = find_run(None) if runs else None
    known = sorted(components_of(meant)) if meant is not None else []
    wrong = next((word for word in words if word.partition(":")[0] not in {"", *known}), None)
    if meant is not None and wrong is None:
        return meant, list(words)
    if Path(words[0]).is_dir():
        return _named(words[0]), list(words[1:])
    wrong = wrong or words[0]
    listed = f"components of {meant.path.name}: {quoted(known)}" if meant is not None and known else None
    help = did_you_mean(wrong.partition(":")[0], [*known, *runs])
    raise RunError(
        f"there is no run `{wrong}`" + (", and no such component" if known else ""),
        where=str(runs_folder()),
        help=help or listed or "name the run folder, or set the folder of the runs with `--runs-dir`",
    )


def _age(folder: RunFolder) -> tuple[float, str]:
    return folder.state.created, folder.path.name


def all_runs(folder: Path | None = None) -> list[RunFolder]:
    """Return the runs in `folder` (by default the folder of runs) by name, without those in `unreadable`."""
    from rlinf_core.runners.storage.run_folder import RunFolder
    from rlinf_core.runners.storage.run_state import runs_in

    return [RunFolder(path, state) for path, state in runs_in((folder or runs_folder()).absolute())]


def unreadable(folder: Path | None = None) -> list[UnreadableRun]:
    """Return the folders in `folder` (by default the folder of runs) whose `run.json` cannot be used."""
    from rlinf_core.runners.storage.run_state import unreadable_runs

    return unreadable_runs((folder or runs_folder()).absolute())


def warn_of_unreadable(folder: Path | None = None) -> None:
    """Print a warning for each run in `folder`, by default the folder of runs, that cannot be read."""
    broken = unreadable(folder)
    for run in broken[:_MOST_UNREADABLE]:
        console.warn(f"{shown(run.path)} is skipped: {run.why}")
    if len(broken) > _MOST_UNREADABLE:
        console.warn(f"{len(broken) - _MOST_UNREADABLE} more folders cannot be read")


def damaged_checkpoints(run: RunFolder, read: int = 0) -> list[str]:
    """Return descriptions of a run's damaged checkpoints, as far as their sizes and `read` bytes show damage."""
    try:
        return run.checkpoints.damaged(read)
    except OSError as error:
        return [f"its checkpoints cannot be read: {error.strerror}"]


def warn_of_damaged(runs: Iterable[RunFolder]) -> None:
    """Print a warning for each damaged checkpoint of the runs, with the checkpoint used instead."""
    for run in runs:
        for words in damaged_checkpoints(run):
            console.warn(f"{shown(run.path)}: {words}")


def _asked(running: list[RunFolder]) -> RunFolder:
    """Ask the user to choose one of several running runs."""
    names = [shown(folder.path) for folder in running]
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(f"{len(running)} runs are active: name one of {', '.join(names)}", param_hint="'RUN'")
    for number, (name, folder) in enumerate(zip(names, running, strict=True), start=1):
        state = folder.state
        started = time.strftime("%H:%M:%S", time.localtime(state.created))
        console.error(f"  {number}  {name}  started {started}, step {state.step}, process {state.pid}")
    while True:
        choice: int = typer.prompt("which run", type=int, err=True)
        if 1 <= choice <= len(running):
            return running[choice - 1]
        console.error(f"a number from 1 to {len(running)}")


def run_at(name: str) -> RunFolder | None:
    """Return the run folder for a path, or for a name in the folder of runs; None if it does not exist."""
    from rlinf_core.runners.storage.run_folder import RunFolder
    from rlinf_core.runners.storage.run_state import STATE

    for path in (Path(name), runs_folder() / name):
        if os.path.lexists(path / STATE):
            return RunFolder.open(path)
    return None


def find_run_folder(name: str) -> RunFolder | None:
    """Return the run folder for a path or a name; None if there is no such run.

    Raises:
        RunError: `name` is a folder without a run.
    """
    run = run_at(name)
    if run is None and Path(name).is_dir() and meant_config(name) is None:
        from rlinf_core.runners.opened_run import folder_without_run

        raise folder_without_run(Path(name), "name a run folder or a job file")
    return run


def config_of(name: str) -> str:
    """Return the configuration file of a run, or `name` unchanged if it names no run."""
    run = find_run_folder(name)
    return name if run is None else str(run.config_file)


def _named(run: str) -> RunFolder:
    folder = run_at(run)
    if folder is not None:
        return folder
    if Path(run).is_dir():
        from rlinf_core.runners.opened_run import folder_without_run

        raise folder_without_run(Path(run))
    names = [folder.path.name for folder in all_runs()]
    raise RunError(
        f"there is no run `{run}`",
        where=str(runs_folder()),
        help=did_you_mean(run, names) or "name the run folder, or set the folder of the runs with `--runs-dir`",
    )
