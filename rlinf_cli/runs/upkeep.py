"""Upkeep of runs: conversion of checkpoints of an earlier version, and deletion of runs with their own checkpoints."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final

import typer

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.runs.run_lookup import (
    SWEEP,
    all_runs,
    damaged_checkpoints,
    find_run,
    runs_folder,
    unreadable,
    warn_of_unreadable,
)
from rlinf_cli.runs.run_table import RunRow, rows_of, runs_text, selected, size_text
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.foreign.files import read_text, write_fault
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import load_job
from rlinf_core.job.recipe import Convert
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import Checkpoint
from rlinf_core.runners.storage.resuming import values_of
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE, outside, why_not_own
from rlinf_core.runners.storage.run_status import RunStatus

CONVERT_SCHEMA: Final = "rlinf.runs-convert/1"


def converted(name: str) -> Result:
    """Convert the checkpoints of a run in place, each atomically, and return the converted ones.

    Args:
        name: the run's folder or name.

    Raises:
        RunError: the run is active, or its checkpoints are not its own.
        CheckpointError: an undamaged checkpoint cannot be converted; it is unchanged.
    """
    run = find_run(name)
    try:
        # Commands that convert, resume or delete the run claim it, too.
        with durable.claimed(run.path / STATE) as ours:
            if not ours or run.refresh().going_on:
                help = (
                    f"`rlinf stop {shlex.quote(shown(run.path))}` ends it"
                    if ours
                    else "wait for the end of the other command"
                )
                why = None if ours else "another command converts, resumes or deletes it"
                where = str(run.checkpoints.folder)
                raise RunError("the checkpoints of an active run cannot be converted", where=where, why=why, help=help)
            return _converted(run)
    except OSError as error:
        why, help = write_fault(run.path, error), "fix its permissions, or free disk space"
        raise RunError("the run cannot be changed", where=str(run.path), why=why, help=help) from error


def _converted(run: RunFolder) -> Result:
    """Convert the checkpoints of a claimed run."""
    foreign = why_not_own(run.path, run.state)
    if foreign is not None:
        where = str(run.checkpoints.folder)
        help = "copy the checkpoints into the folder `checkpoints` of the run, and write that into its run.json"
        raise RunError("the checkpoints are not the run's own", where=where, why=foreign, help=help)
    for folder in run.checkpoints.folders():
        if folder.is_symlink():
            help = "put the folder in its place, or remove the link"
            why = "it is a link, and what others may use is not replaced"
            raise CheckpointError("a checkpoint cannot be converted", where=str(folder), why=why, help=help)
    run.checkpoints.recover()
    recipe = load_job(str(run.config_file)).recipe
    convert = None if recipe is None else recipe.load(recipe.convert)
    steps: dict[str, list[int]] = {"converted": [], "unchanged": []}
    changed: list[str] = []
    for checkpoint in run.checkpoints.complete():
        try:
            checkpoint.verify()
        except CheckpointError as error:
            changed.append(f"checkpoint {checkpoint.path.name} is damaged: {error.why}; it is left as it is")
            continue
        was_earlier = convert is not None and _convert(run, checkpoint, convert)
        steps["converted" if was_earlier else "unchanged"].append(checkpoint.step)
    damaged = [*damaged_checkpoints(run), *changed]
    done, rest = (", ".join(map(str, steps[kind])) for kind in ("converted", "unchanged"))
    none = f"no {'undamaged ' if damaged else ''}checkpoint is of an earlier version"
    plural = "s" * (len(steps["converted"]) > 1)
    lines = [f"converted the checkpoint{plural} of step{plural} {done}" if done else none]
    lines += [f"those of steps {rest} are of this version"] if done and rest else []
    record = {"schema": CONVERT_SCHEMA, "run": str(run.path.absolute()), **steps, "damaged_checkpoints": damaged}
    return Result("\n".join(lines), record, ExitCode.FAILED if changed else ExitCode.OK, tuple(damaged))


def _convert(run: RunFolder, checkpoint: Checkpoint, convert: Convert) -> bool:
    """Convert an undamaged checkpoint; return whether it needed conversion."""
    into = run.checkpoints.begin(checkpoint.step)
    try:
        was_earlier = convert(checkpoint.path, into)
    except BaseException:
        run.checkpoints.abandon(checkpoint.step)
        raise
    if was_earlier:
        run.checkpoints.replace(checkpoint)
    else:
        run.checkpoints.abandon(checkpoint.step)
    return was_earlier


PRUNE_SCHEMA: Final = "rlinf.runs-prune/1"
_UNITS: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def age_in_seconds(text: str | None) -> float | None:
    """Return an age such as `36h` or `7d` in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())
    if match is None:
        raise typer.BadParameter("write a number with m, h, d or w, as in `36h` or `7d`", param_hint="'--older-than'")
    return float(match[1]) * _UNITS[match[2]]


def pruned(
    names: Sequence[str] | None,
    statuses: Sequence[RunStatus] | None,
    recipe: str | None,
    older_than: float | None,
    keep: int,
    *,
    delete: bool,
) -> Result:
    """Return the selected runs; with `delete`, delete them.

    Args:
        names: run folders or names of runs; None for all.
        statuses, recipe: the selected statuses and recipe; None for all.
        older_than: the least age of a selected run in seconds, since its start.
        keep: the number of the newest runs to keep.
    """
    candidates = list({os.path.normpath(run.path): run for run in map(find_run, names)}.values()) if names else None
    chosen = selected(statuses=statuses, recipe=recipe, among=candidates)
    chosen.sort(key=lambda run: (run.state.created, run.path.name), reverse=True)
    if older_than is not None:
        chosen = [run for run in chosen if time.time() - run.state.created > older_than]
    going_on = [run for run in chosen if run.state.going_on]
    ended = [run for run in chosen if run not in going_on][keep:]
    needed = _needed(ended)
    rows = rows_of(run for run in ended if run.path not in needed)
    broken = [] if names else unreadable()
    if delete:
        rows = [row for row in rows if _delete(row.run)]
    total = sum(row.size for row in rows)
    left = [] if names else _left_over(older_than, delete=delete)
    record = {
        "schema": PRUNE_SCHEMA,
        "folder": str(runs_folder().absolute()),
        "dry_run": not delete,
        "bytes": total,
        "runs": [row.record() for row in rows],
        "left_over": [{"what": what, "bytes": size} for what, size in left],
        "going_on": [run.path.name for run in going_on],
        "needed": [{"name": path.name, "reason": why} for path, why in needed.items()],
        "unreadable": [{"folder": str(run.path), "reason": run.why} for run in broken],
    }
    count = f"{len(rows)} run{'' if len(rows) == 1 else 's'}, {size_text(total)}"
    verdict = f"deleted {count}" if delete else f"would delete {count}; add --delete to delete"
    if not names:
        warn_of_unreadable()
    return Result(
        "\n".join([runs_text(rows), *_elsewhere(rows)]) if rows else "",
        record,
        ExitCode.OK if len(rows) == len(ended) - len(needed) else ExitCode.FAILED,
        (
            *map(_why_kept, going_on),
            *(f"{path.name} is kept: {why}" for path, why in needed.items()),
            *(f"{'deleted' if delete else 'would delete'} {what}, {size_text(size)}" for what, size in left),
            verdict if ended else "no runs selected",
        ),
    )


def _needed(chosen: Sequence[RunFolder]) -> dict[Path, str]:
    """Return the folders of the chosen runs that a remaining run needs, each with the reason."""
    homes = {run.path: run.path.resolve() for run in chosen}
    folders = [runs_folder(), *(file.parent for file in runs_folder().glob(f"*/{SWEEP}"))]
    remaining = [run for run in chain(*map(all_runs, folders)) if run.path.resolve() not in homes.values()]
    needed: dict[Path, str] = {}
    while remaining:
        user = remaining.pop()
        for key, place in _places_used(user, [run.path.name for run in chosen]):
            for run in chosen:
                if run.path not in needed and Path(os.path.realpath(place)).is_relative_to(homes[run.path]):
                    needed[run.path] = f"{user.path.name} needs it, by `{key}`; delete that run, too, or first"
                    remaining.append(run)
    return needed


def _places_used(run: RunFolder, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the values of a run's configuration that contain one of the names, and where an active run resumed from."""
    if run.state.going_on and run.state.resumed_from is not None:
        yield "runner.resume_dir", run.state.resumed_from
    with suppress(OSError):
        text = read_text(run.config_file)
        # Most runs name no other one, and are not parsed.
        if any(name in text for name in names):
            yield from ((key, value) for key, value in (values_of(text) or {}).items() if isinstance(value, str))


def _left_over(older_than: float | None, *, delete: bool) -> list[tuple[str, int]]:
    """Return the unused files that runs left outside of their folders, as collected by their recipes."""
    left: list[tuple[str, int]] = []
    for name in recipe_names():
        recipe = find_recipe(name)
        if (collect := recipe.load(recipe.collect)) is not None:
            left += collect(older_than, delete=delete)
    return left


def _elsewhere(rows: Sequence[RunRow]) -> Iterator[str]:
    """Yield a line for each run with checkpoints outside of its folder: their location, size, and deletion or not."""
    for row in rows:
        if row.elsewhere is not None:
            what = f"{row.run.path.name}: checkpoints in {row.elsewhere}"
            own = f"{what}, {size_text(row.elsewhere_size)}, are deleted with it"
            yield own if row.foreign is None else f"{what} are kept: {row.foreign}"


def _why_kept(run: RunFolder) -> str:
    if run.state.alive:
        return f"{run.path.name} is active and kept"
    return (
        f"{run.path.name} may be active and is kept: {run.state.process} is not visible from here; if it has ended"
        f" for certain, `rlinf stop {shlex.quote(str(run.path))} --force` releases it"
    )


def _delete(run: RunFolder) -> bool:
    """Delete a run; return whether it is completely gone. Print failures."""
    try:
        delete_run(run)
    except OSError as error:
        console.error_block(
            f"{run.path.name} cannot be deleted completely",
            # `rmtree` names a file below an open folder without that folder.
            where=error.filename if error.filename and os.path.isabs(error.filename) else str(run.path),
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


def delete_run(run: RunFolder) -> None:
    """Delete a finished run: its checkpoints, then its folder, the state file last.

    An interrupted deletion leaves a run that can be deleted again. Links are deleted, not followed. Checkpoints outside
    of the folder are deleted only if they have this run's mark (`ownership`).

    Raises:
        OSError: a file cannot be deleted, the run has (or may have) started again, or its folder is a link.
        RunError: the run's state cannot be read.
    """
    if run.path.is_symlink():
        raise OSError(None, "it is a link; delete the run at its target, or remove the link by hand", str(run.path))
    # A command that resumes the run also claims it.
    with durable.claimed(run.path / STATE) as ours:
        if not ours or run.refresh().going_on:
            raise OSError(None, "the run has started again", str(run.path))
        elsewhere = outside(run.path, run.state)
        if elsewhere is not None and why_not_own(run.path, run.state) is None:
            shutil.rmtree(elsewhere)
        for child in sorted(run.path.iterdir()):
            if child.name == STATE:
                continue
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        (run.path / STATE).unlink()
    run.path.rmdir()
