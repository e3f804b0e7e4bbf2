"""`rlinf runs prune`: delete run folders."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Verbose
from rlinf_cli.commands.results.runs.listing import RecipeFilter, Statuses
from rlinf_cli.console import console
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from rlinf_cli.runs.run_table import RunRow
    from rlinf_core.runners.storage.run_folder import RunFolder

SCHEMA = "rlinf.runs-prune/1"
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def _seconds(text: str | None) -> float | None:
    """Return an age such as `36h` or `7d` in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())
    if match is None:
        raise typer.BadParameter("write a number with m, h, d or w, as in `36h` or `7d`", param_hint="'--older-than'")
    return float(match[1]) * _UNITS[match[2]]


def prune(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", hidden=True, autocompletion=completion.runs)
    ] = None,
    status: Statuses = None,
    recipe: RecipeFilter = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Only runs started longer ago: 36h, 7d.", show_default=False),
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=0, help="Keep the newest N of the selected runs.")
    ] = 0,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the runs; by default they are only listed.", show_default=False)
    ] = False,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List the runs that would be deleted; with --delete, delete their folders, logs and checkpoints.

    RUN... are run folders or their names in the folder of runs; by default all that the options select. A run that is
    active, or may be active on another machine, is never deleted. Checkpoints outside of the run folder are deleted
    only if they bear the mark of that run.
    """
    from rlinf_cli.runs.run_lookup import find_run, unreadable, warn_of_unreadable
    from rlinf_cli.runs.run_table import rows_of, runs_text, selected, size_text

    seconds = _seconds(older_than)
    if not (runs or status or recipe or seconds is not None or keep):
        raise typer.BadParameter("name the runs, or select them with --status, --recipe, --older-than or --keep")
    candidates = [find_run(run, log_path) for run in runs] if runs else None
    chosen = selected(log_path, statuses=status, recipe=recipe, among=candidates)
    chosen.sort(key=lambda run: (run.state.created, run.path.name), reverse=True)
    if seconds is not None:
        chosen = [run for run in chosen if time.time() - run.state.created > seconds]
    going_on = [run for run in chosen if run.state.going_on]
    ended = [run for run in chosen if run not in going_on][keep:]
    rows = rows_of(ended)
    total = sum(row.size for row in rows)
    broken = [] if runs else unreadable(log_path)
    deleted = [run for run in ended if _delete(run)] if delete else []
    if output is Output.JSON:
        console.result_json(
            {
                "schema": SCHEMA,
                "folder": str(log_path.absolute()),
                "dry_run": not delete,
                "bytes": total,
                "runs": [row.record() for row in rows],
                "going_on": [run.path.name for run in going_on],
                "unreadable": [{"folder": str(run.path), "reason": run.why} for run in broken],
            }
        )
    elif rows:
        console.result(runs_text(rows))
        for line in _elsewhere(rows):
            console.result(line)
    for run in going_on:
        console.message(_why_kept(run))
    if not runs:
        warn_of_unreadable(log_path)
    count = f"{len(rows)} run{'' if len(rows) == 1 else 's'}, {size_text(total)}"
    if not rows:
        console.message("no runs selected")
    elif not delete:
        console.message(f"would delete {count}; add --delete to delete")
    else:
        console.message(f"deleted {count}")
    if len(deleted) < len(ended) and delete:
        raise typer.Exit(1)


def _elsewhere(rows: Sequence[RunRow]) -> Iterator[str]:
    """Return a line for each run with checkpoints outside of its folder: location, size, and whether they are
    deleted."""
    from rlinf_cli.runs.run_table import size_text

    for row in rows:
        if row.elsewhere is not None:
            what = f"{row.name}: checkpoints in {row.elsewhere}"
            own = f"{what}, {size_text(row.elsewhere_size)}, are deleted with it"
            yield own if row.foreign is None else f"{what} are kept: {row.foreign}"


def _why_kept(run: RunFolder) -> str:
    if run.state.alive:
        return f"{run.path.name} is active and kept"
    return (
        f"{run.path.name} may be active and is kept: {run.state.process} is not visible from here; if it has ended"
        f" for certain, `rlinf stop {run.path} --force` releases it"
    )


def _delete(run: RunFolder) -> bool:
    """Delete a run; return whether it is completely gone. Failures are reported."""
    from rlinf_cli.runs.run_deletion import delete_run
    from rlinf_core.errors import RunError

    try:
        delete_run(run)
    except OSError as error:
        console.error_block(
            f"{run.path.name} cannot be deleted completely",
            where=error.filename or str(run.path),
            why=error.strerror or str(error),
            do="fix the permissions, and delete again",
        )
        return False
    except RunError as error:
        console.error_block(
            f"{run.path.name} cannot be deleted", where=error.where, why=error.why or error.message, do=error.help
        )
        return False
    return True
