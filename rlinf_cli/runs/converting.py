"""Conversion of a run's checkpoints that an earlier version wrote."""

from __future__ import annotations

from typing import Final

from rlinf_cli.command import Result
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.run_lookup import damaged_checkpoints, find_run
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.foreign.files import write_fault
from rlinf_core.job.load import load_job
from rlinf_core.job.recipe import Convert
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import Checkpoint
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE, why_not_own

SCHEMA: Final = "rlinf.runs-convert/1"


def converted(name: str) -> Result:
    """Convert the checkpoints of a run in place, each atomically, and return which.

    Args:
        name: the run's folder or name.

    Raises:
        RunError: the run is active, or its checkpoints are not its own.
        CheckpointError: one cannot be converted, though it is undamaged; it is as it was.
    """
    run = find_run(name)
    try:
        # Another conversion, a command that resumes the run, and one that deletes it claim it, too.
        with durable.claimed(run.path / STATE) as ours:
            if not ours or run.refresh().going_on:
                help = f"`rlinf stop {shown(run.path)}` ends it" if ours else "wait for the end of the other command"
                why = None if ours else "another command converts, resumes or deletes it"
                where = str(run.checkpoints.folder)
                raise RunError("the checkpoints of an active run cannot be converted", where=where, why=why, help=help)
            return _converted(run)
    except OSError as error:
        why, help = write_fault(run.path, error), "fix its permissions, or free disk space"
        raise RunError("the run cannot be changed", where=str(run.path), why=why, help=help) from error


def _converted(run: RunFolder) -> Result:
    """Convert the checkpoints of a run that nobody else changes."""
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
    lines = [f"converted the checkpoints of steps {done}" if done else none]
    lines += [f"those of steps {rest} are of this version"] if done and rest else []
    record = {"schema": SCHEMA, "run": str(run.path.absolute()), **steps, "damaged_checkpoints": damaged}
    return Result("\n".join(lines), record, ExitCode.FAILED if changed else ExitCode.OK, tuple(damaged))


def _convert(run: RunFolder, checkpoint: Checkpoint, convert: Convert) -> bool:
    """Convert an undamaged checkpoint; return whether there was something to do."""
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
