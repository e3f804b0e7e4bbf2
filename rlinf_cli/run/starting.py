"""The start of a run: its file is checked and laid out, and the driver runs here or on the head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.job.config_view import config_record, config_text
from rlinf_cli.job.job_file import file_of_recipe, load, show_findings, sound, split_files
from rlinf_cli.placement.job_layout import lay_out
from rlinf_cli.placement.placement_picture import picture_of
from rlinf_cli.placement.placement_summary import placement_record, summary_text
from rlinf_cli.run.remote_driver import choose_cluster, cluster_elsewhere, train_there
from rlinf_cli.run.runnable import check_has_program, check_installed, recipe_of, with_hub_pins
from rlinf_core.config.composing.origins import origins, says_something
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.secrets import mask
from rlinf_core.errors import PlacementError

if TYPE_CHECKING:
    from rlinf_cli.job.job_file import SoundJob
    from rlinf_core.job.load import Job


def chosen(arguments: list[str]) -> tuple[str, Sequence[str]]:
    """Return the file and the overrides of a command line."""
    files, overrides = split_files(arguments)
    if len(files) != 1:
        message = f"one file at a time, not {len(files)}: {', '.join(files)}" if files else "name a file or a recipe"
        raise typer.BadParameter(f"{message}, as in `rlinf train embodied`")
    return file_of_recipe(files[0], overrides)


def start(
    file: str,
    overrides: Sequence[str],
    assume: Sequence[str] | None,
    *,
    dry_run: bool,
    detach: bool,
    already_shown: bool = False,
) -> Result | int:
    """Train a job, and return the exit code; or return its plan.

    Args:
        file, overrides, assume: the arguments of the command line.
        dry_run: whether only the plan is wanted.
        detach: whether it runs in the background.
        already_shown: whether the user has seen the warnings of the file and its plan.

    Raises:
        RLinfError: it cannot be started.
        typer.Exit: the file has errors, which are printed on standard error.
    """
    job = load(file, overrides, assume)
    if job.recipe is not None and not dry_run:
        check_has_program(job.recipe)
    parts = sound(job)
    if not (console.verbosity.quiet or already_shown):
        show_findings(job, Severity.WARNING)
    recipe = recipe_of(job)
    if dry_run:
        return _plan_result(job, parts, file)
    if not already_shown:
        _show_plan(parts, file)
    cluster = cluster_elsewhere(parts, file)
    if cluster is not None:
        return train_there(cluster, parts, detached=detach)
    check_installed()
    job = with_hub_pins(job, file, overrides)
    choose_cluster(sound(job), file, already_shown=already_shown)
    from rlinf_cli.run.training import run, run_detached

    return (run_detached if detach else run)(job, recipe)


def _show_plan(parts: SoundJob, file: str) -> None:
    """Show the placement in a few lines, if the file determines it."""
    if console.verbosity.quiet:
        return
    try:
        console.message(f"{_plan(parts, file)}\n")
    except PlacementError:
        # Undeclared accelerators are counted once the nodes are up.
        console.message("the placement depends on the nodes' accelerators, which the file does not declare\n")


def _plan(parts: SoundJob, file: str) -> str:
    layout = lay_out(parts, "placement", file)
    picture = picture_of(Path(parts.name).name, parts.cluster, parts.topology, layout.placements, layout.mode)
    return summary_text(parts, layout, picture)


def _plan_result(job: Job, parts: SoundJob, file: str) -> Result:
    tree = mask(parts.tree, parts.secret)
    values = list(origins(tree, parts.model))

    def text() -> str:
        return f"{_plan(parts, file)}\n\n{config_text(origin for origin in values if says_something(origin))}"

    def record() -> dict[str, object]:
        return {
            "schema": "rlinf.plan/1",
            "recipe": job.recipe.name if job.recipe else None,
            "placement": placement_record(parts, lay_out(parts, "placement", file)),
            "config": config_record(tree, values),
        }

    return Result(text, record, notes=("\nnothing was started, and nothing written",))
