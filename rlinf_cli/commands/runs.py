"""`rlinf runs`: the runs of a folder."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Recipe, Runs
from rlinf_cli.command import Result, arg, command, group, opt
from rlinf_core.runners.storage.run_status import RunStatus


class Sort(StrEnum):
    """The column that runs are sorted by."""

    AGE = "age"
    NAME = "name"
    STEP = "step"
    RESULT = "result"
    SIZE = "size"


Statuses = Annotated[
    list[RunStatus] | None,
    opt("--status STATUS", f"Only runs with this status: {', '.join(RunStatus)}. May be repeated."),
]

runs = group("List the runs of a folder, newest first; `prune` deletes some.", default="list")


@command("rlinf runs list --status failed --sort result", app=runs, name="list")
def list_(
    status: Statuses = None,
    recipe: Recipe = None,
    sort: Annotated[Sort, opt("--sort", "Sort key: age puts the newest first, numbers the largest.")] = Sort.AGE,
    reverse: Annotated[bool, opt("--reverse", "Reverse the order.")] = False,
) -> Result:
    """List runs: recipe, status, step, result, age and size.

    The result is that of the last evaluation, or without evaluations that of the last training step.
    """
    from rlinf_cli.runs.run_table import listed_runs

    return listed_runs(status, recipe, sort, reverse=reverse)


@command("rlinf runs prune --status failed --older-than 7d", app=runs)
def prune(
    names: Runs = None,
    status: Statuses = None,
    recipe: Recipe = None,
    older_than: Annotated[str | None, opt("--older-than AGE", "Only runs started longer ago: 36h, 7d.")] = None,
    keep: Annotated[int, opt("--keep N", "Keep the newest N of the selected runs.", min=0)] = 0,
    delete: Annotated[bool, opt("--delete", "Delete the runs; by default they are only listed.")] = False,
) -> Result:
    """List the runs that would be deleted; --delete deletes them.

    RUN... are run folders or their names in the folder of runs; by default all that the options select. A run that is
    active, or may be active on another machine, is never deleted. Checkpoints outside of the run folder are deleted
    only if they bear the mark of that run.
    """
    from rlinf_cli.runs.pruning import age_in_seconds, pruned

    seconds = age_in_seconds(older_than)
    if not (names or status or recipe or seconds is not None or keep):
        raise typer.BadParameter("name the runs, or select them with --status, --recipe, --older-than or --keep")
    return pruned(names, status, recipe, seconds, keep, delete=delete)


@command("rlinf runs convert runs/embodied-20260728-101500", app=runs)
def convert(run: Annotated[str, arg("RUN", completion.runs)]) -> Result:
    """Convert the checkpoints of a run that an earlier version wrote.

    What they pickled is no longer read. Each is replaced, in place, once the new one is complete: that needs room for
    the largest.
    """
    from rlinf_cli.runs.converting import converted

    return converted(run)
