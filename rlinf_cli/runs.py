"""The run that a command is about: named, or the one that is running, or the last."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli import completion

if TYPE_CHECKING:
    from rlinf_core.runners.run_folder import RunFolder

DEFAULT_LOG_PATH = Path("runs")

Run = Annotated[str | None, typer.Argument(metavar="RUN", hidden=True, autocompletion=completion.runs)]
LogPath = Annotated[
    Path,
    typer.Option(
        "--log-path",
        metavar="FOLDER",
        help="Where the run folders are, `runner.logger.log_path` of the runs.",
        show_default=False,
    ),
]


def find_run(run: str | None, log_path: Path) -> RunFolder:
    """Return the folder of a run.

    Args:
        run: its path, or its name in `log_path`; None for the one that started last of those that are running, or of
            all where none is.

    Raises:
        RunError: there is none.
    """
    from rlinf_core.errors import RunError

    if run is not None:
        return _named(run, log_path)
    folders = all_runs(log_path)
    running = [folder for folder in folders if folder.state.alive]
    if not folders:
        raise RunError(
            "there is no run",
            where=str(log_path),
            help="name the run folder, or where run folders are with `--log-path`; `rlinf train` makes them",
        )
    return max(running or folders, key=lambda folder: (folder.state.created, folder.path.name))


def all_runs(log_path: Path) -> list[RunFolder]:
    """Return the run folders in `log_path`, by name."""
    from rlinf_core.errors import RunError
    from rlinf_core.runners.run_folder import STATE, RunFolder

    found: list[RunFolder] = []
    for state in sorted(log_path.glob(f"*/{STATE}")):
        try:
            found.append(RunFolder.open(state.parent))
        except RunError:
            continue
    return found


def _named(run: str, log_path: Path) -> RunFolder:
    from rlinf_core.errors import RunError
    from rlinf_core.runners.run_folder import STATE, RunFolder
    from rlinf_core.suggest import did_you_mean

    for path in (Path(run), log_path / run):
        if (path / STATE).exists():
            return RunFolder.open(path)
    names = [folder.path.name for folder in all_runs(log_path)]
    raise RunError(
        f"there is no run `{run}`",
        where=str(log_path),
        help=did_you_mean(run, names) or "name the run folder; `--log-path` says where run folders are",
    )
