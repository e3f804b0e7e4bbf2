"""The job and the checkpoint for commands that use a policy, from a file or a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlinf_cli.console import console

if TYPE_CHECKING:
    from rlinf_core.job.load import Job
    from rlinf_core.job.recipe import Recipe
    from rlinf_core.runners.storage.run_folder import RunFolder


class UsedJob(NamedTuple):
    """A validated job that a command uses.

    Attributes:
        job: the job of the file, or of the run's `config.yaml`.
        recipe: the recipe of the job.
        run: the run folder; None if a file was named.
    """

    job: Job
    recipe: Recipe
    run: RunFolder | None


def used_job(name: str, overrides: list[str], command: str, checkpoint: str | None) -> UsedJob:
    """Return the validated job of a file or a run, and choose its cluster.

    Args:
        name: a file, a shipped configuration, a run folder, or the name of a run.
        overrides: `key=value` and `~key` arguments.
        command: the command that uses it.
        checkpoint: the checkpoint that is given.

    Raises:
        typer.Exit: the configuration has errors, which are printed.
        ConfigError: it selects no recipe, or the command ignores one of `overrides`.
        RLinfError: its machines do not include this one.
    """
    from rlinf_cli.job.job_file import load, show_findings, sound, without_start, without_training_data
    from rlinf_cli.run.hub_pins import with_hub_pins
    from rlinf_cli.run.remote_driver import choose_cluster, cluster_elsewhere
    from rlinf_cli.run.runnable import check_installed
    from rlinf_cli.run.unused_keys import refuse_unused
    from rlinf_core.config.diagnostics import Severity
    from rlinf_core.errors import ConfigError, RLinfError

    run = find_run_folder(name)
    file = str(run.config_file) if run is not None else name
    job = without_training_data(load(file, overrides))
    if run is not None:
        job = without_start(job)
    refuse_unused(job, overrides, command, of_run=run is not None, checkpoint=checkpoint)
    parts = sound(job)
    if not console.verbosity.quiet:
        show_findings(job, Severity.WARNING)
    if job.recipe is None:
        raise ConfigError("the file selects no recipe", where=job.name, help="add `recipe: NAME` to it")
    recipe = job.recipe
    check_installed()
    elsewhere = cluster_elsewhere(parts, file)
    if elsewhere is not None:
        raise RLinfError(
            "this machine is not one of the file's machines",
            where=job.name,
            help=f"run the same command on their head, `{elsewhere.nodes[0].host}`",
        )
    job = without_training_data(with_hub_pins(job, file, overrides, trains=False))
    job = without_start(job) if run is not None else job
    choose_cluster(sound(job), file, already_shown=True)
    return UsedJob(job, recipe, run)


def find_run_folder(name: str) -> RunFolder | None:
    """Return the run folder for a path or a name; None if there is no such run.

    Raises:
        RunError: it is a folder without a run.
    """
    from rlinf_cli.runs.run_lookup import NO_RUN_THERE, run_at
    from rlinf_core.config.shipped import meant_config
    from rlinf_core.runners.opened_run import folder_without_run

    run = run_at(name)
    if run is None and Path(name).is_dir() and meant_config(name) is None:
        raise folder_without_run(Path(name), NO_RUN_THERE)
    return run


def config_of(name: str) -> str:
    """Return the configuration file of a run, or a name of another file as it is."""
    run = find_run_folder(name)
    return name if run is None else str(run.config_file)


def checkpoint_of(checkpoint: str | None, run: RunFolder | None) -> Path | None:
    """Return the `global_step_N` folder: the given one, else the newest of the run.

    Args:
        checkpoint: a `global_step_N` folder, its number in the run, or a run folder or its `checkpoints` for the newest
            one.
        run: see above.

    Raises:
        CheckpointError: it does not exist, or it is damaged.
    """
    from rlinf_core.errors import CheckpointError
    from rlinf_core.runners.storage.checkpoint import sound_checkpoint
    from rlinf_core.runners.storage.checkpoint_store import CheckpointStore
    from rlinf_core.runners.storage.run_folder import RunFolder
    from rlinf_core.runners.storage.run_state import STATE

    if checkpoint is None and run is None:
        return None
    if checkpoint is not None:
        path = Path(checkpoint)
        if checkpoint.isdigit() and run is not None and not path.exists():
            path = run.checkpoints.folder / f"global_step_{checkpoint}"
        if os.path.lexists(path / STATE):
            run = RunFolder.open(path)
        elif (newest := CheckpointStore(path).latest_sound()) is not None:
            return newest.path
        else:
            return sound_checkpoint(path).path
    latest = run.checkpoints.latest_sound() if run is not None else None
    if latest is None:
        raise CheckpointError(
            "the run has no sound checkpoint",
            where=str(run.path if run is not None else checkpoint),
            help="name one with `--checkpoint`",
        )
    return latest.path
