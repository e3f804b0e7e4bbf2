"""`rlinf train`: validate, plan, start, follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Assume, Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.file.job_file import file_of_recipe, split_files
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from rlinf_cli.file.job_file import SoundJob
    from rlinf_core.job.load import Job
    from rlinf_core.job.recipe import Recipe


_SKIP_CHECKS: Final = "runner.skip_checks"


def train(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE|recipe=NAME", hidden=True, autocompletion=completion.training),
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Validate, show placement and resolved config, start nothing.", show_default=False
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background and return.", show_default=False)
    ] = False,
    skip_checks: Annotated[
        bool,
        typer.Option(
            "--skip-checks",
            help="Skip the slow comparisons before the first step: `runner.skip_checks`.",
            show_default=False,
        ),
    ] = False,
    # Set by `rlinf train` on another machine, which has already shown the warnings of the file.
    already_shown: Annotated[bool, typer.Option("--told", hidden=True)] = False,
    assume: Assume = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train the job that a file describes.

    FILE is a path, the name of a shipped config, or `-`; `recipe=NAME` starts from the recipe's own config. KEY=VALUE
    replaces a value of it, as in `runner.max_steps=50`, and ~KEY deletes one. Ctrl-C ends the run cleanly; a second one
    ends it at once. --assume is for --dry-run: a real run probes the machines.
    """
    from rlinf_cli.file.job_file import load, show_findings, sound
    from rlinf_cli.run.runnable import check_has_program, check_installed
    from rlinf_core.config.diagnostics import Severity

    file, overrides = _chosen(arguments)
    if assume and not dry_run:
        raise typer.BadParameter("a real run probes the machines; use it with --dry-run", param_hint="'--assume'")
    overrides = (*overrides, f"{_SKIP_CHECKS}=true") if skip_checks else overrides
    job = load(file, overrides, assume)
    if job.recipe is not None and not dry_run:
        check_has_program(job.recipe)
    parts = sound(job)
    if not (console.verbosity.quiet or already_shown):
        show_findings(job, Severity.WARNING)
    recipe = _recipe(job)
    if dry_run:
        _dry_run(job, parts, file, output)
        return
    if not already_shown:
        _show_plan(parts, file)
    from rlinf_cli.run.hub_pins import with_hub_pins
    from rlinf_cli.run.remote_driver import choose_cluster, cluster_elsewhere, train_there

    cluster = cluster_elsewhere(parts, file)
    if cluster is not None:
        raise typer.Exit(train_there(cluster, parts, output, detached=detach))
    check_installed()
    job = with_hub_pins(job, file, overrides)
    choose_cluster(sound(job), file, already_shown=already_shown)
    from rlinf_cli.run.training import run, run_detached

    raise typer.Exit((run_detached if detach else run)(job, recipe, output))


app = command(
    train,
    examples=(
        "rlinf train recipe=embodied",
        "rlinf train math_laptop runner.max_steps=50 actor.seed=7",
        "rlinf train job.yaml --dry-run",
    ),
    no_args_is_help=True,
)


def _chosen(arguments: list[str]) -> tuple[str, Sequence[str]]:
    """Return the file and the overrides."""
    from rlinf_core.job.find_recipe import recipe_names

    files, overrides = split_files(arguments)
    if len(files) > 1:
        raise typer.BadParameter(f"one file at a time, not {len(files)}: {', '.join(files)}")
    if not files:
        raise typer.BadParameter("name a file or a recipe, as in `rlinf train recipe=embodied`")
    if files[0] in recipe_names() and not _exists(files[0]):
        raise typer.BadParameter(f"`{files[0]}` is a recipe, not a file: write `recipe={files[0]}`")
    return file_of_recipe(files[0], overrides)


def _exists(file: str) -> bool:
    import os

    from rlinf_core.config.shipped import shipped_config

    return os.path.exists(file) or shipped_config(file) is not None


def _recipe(job: Job) -> Recipe:
    from rlinf_core.errors import ConfigError

    if job.recipe is None:
        raise ConfigError(
            "the file selects no recipe, so there is nothing to run",
            where=job.name,
            help="add `recipe: NAME` to it, or pass `recipe=NAME`; `rlinf recipes` lists the names",
        )
    return job.recipe


def _show_plan(parts: SoundJob, file: str) -> None:
    """Show the placement in a few lines, if the file determines it."""
    from rlinf_core.errors import PlacementError

    if console.verbosity.quiet:
        return
    try:
        console.message(f"{_plan(parts, file)}\n")
    except PlacementError:
        # Undeclared accelerators are counted once the nodes are up.
        console.message("the placement depends on the nodes' accelerators, which the file does not declare\n")


def _plan(parts: SoundJob, file: str) -> str:
    from pathlib import Path

    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.placement.placement_picture import picture_of
    from rlinf_cli.placement.placement_summary import summary_text

    layout = lay_out(parts, "placement", file)
    picture = picture_of(Path(parts.name).name, parts.cluster, parts.topology, layout.placements, layout.mode)
    return summary_text(parts, layout, picture)


def _dry_run(job: Job, parts: SoundJob, file: str, output: Output) -> None:
    from rlinf_cli.render.config_view import config_record, config_text
    from rlinf_core.config.composing.origins import origins, says_something
    from rlinf_core.config.secrets import mask

    tree = mask(parts.tree, parts.secret)
    all_origins = list(origins(tree, parts.model))
    if output is Output.JSON:
        from rlinf_cli.placement.job_layout import lay_out
        from rlinf_cli.placement.placement_record import placement_record

        console.result_json(
            {
                "schema": "rlinf.plan/1",
                "recipe": job.recipe.name if job.recipe else None,
                "placement": placement_record(parts, lay_out(parts, "placement", file)),
                "config": config_record(tree, all_origins),
            }
        )
        return
    console.result(f"{_plan(parts, file)}\n")
    console.result(config_text(origin for origin in all_origins if says_something(origin)))
    console.message("\nnothing was started, and nothing written")
