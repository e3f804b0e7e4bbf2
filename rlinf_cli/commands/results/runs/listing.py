"""`rlinf runs`: a table of the runs of a folder."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH
from rlinf_core.runners.storage.run_status import RunStatus

if TYPE_CHECKING:
    from rlinf_cli.runs.run_table import RunRow

SCHEMA = "rlinf.runs/1"


class Sort(StrEnum):
    """The column that runs are sorted by."""

    AGE = "age"
    NAME = "name"
    STEP = "step"
    RESULT = "result"
    SIZE = "size"


Statuses = Annotated[
    list[RunStatus] | None,
    typer.Option("--status", help="Only runs with this status. May be repeated.", show_default=False),
]
RecipeFilter = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Only runs of this recipe.",
        autocompletion=completion.recipes,
        show_default=False,
    ),
]


def runs(
    ctx: typer.Context,
    status: Statuses = None,
    recipe: RecipeFilter = None,
    sort: Annotated[
        Sort, typer.Option("--sort", help="Sort key: age puts the newest first, numbers the largest.")
    ] = Sort.AGE,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.", show_default=False)] = False,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List the runs of a folder: recipe, status, step, result, age and size.

    The result is that of the last evaluation, or without evaluations that of the last training step.
    """
    if ctx.invoked_subcommand is not None:
        return
    from rlinf_cli.live.run_summary import shown
    from rlinf_cli.runs.run_lookup import unreadable, warn_of_unreadable
    from rlinf_cli.runs.run_table import rows_of, runs_text, selected

    rows = _sorted(rows_of(selected(log_path, statuses=status, recipe=recipe)), sort)
    if reverse:
        rows.reverse()
    if output is Output.JSON:
        console.result_json(
            {
                "schema": SCHEMA,
                "folder": str(log_path.absolute()),
                "runs": [row.record() for row in rows],
                "unreadable": [{"folder": str(broken.path), "reason": broken.why} for broken in unreadable(log_path)],
            }
        )
        return
    warn_of_unreadable(log_path)
    if not rows:
        console.message(f"no such runs in {log_path}" if status or recipe else f"no runs in {log_path}")
        return
    console.result(runs_text(rows))
    for row in rows:
        for words in row.damaged:
            console.warn(f"{shown(row.folder)}: {words}")
    failed = [row for row in rows if row.status == RunStatus.FAILED]
    if failed:
        console.message(f"`rlinf logs {shown(failed[0].folder)}` shows the log of a failed run")


def _sorted(rows: list[RunRow], by: Sort) -> list[RunRow]:
    if by is Sort.NAME:
        return sorted(rows, key=lambda row: row.name)
    if by is Sort.STEP:
        return sorted(rows, key=lambda row: row.step, reverse=True)
    if by is Sort.SIZE:
        return sorted(rows, key=lambda row: row.size, reverse=True)
    if by is Sort.RESULT:
        # Runs without a result come last.
        return sorted(rows, key=lambda row: (row.value is not None, row.value or 0.0), reverse=True)
    return sorted(rows, key=lambda row: (row.created, row.name), reverse=True)
