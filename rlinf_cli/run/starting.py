"""The start of a job: checks before anything is started or written, the plan, and the driver here or on the head."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import typer

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.job.job_file import SoundJob, file_of_recipe, load, show_findings, sound, split_files
from rlinf_cli.job.job_layout import lay_out
from rlinf_cli.job.picture import picture_of
from rlinf_cli.job.views import config_record, config_text, placement_record, summary_text
from rlinf_cli.run.driver import choose_cluster, cluster_elsewhere, train_there
from rlinf_cli.runs import run_lookup
from rlinf_core.config.composing.origins import origins, says_something
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.secrets import mask
from rlinf_core.config.sections.values import HubPath, commit_of, ensure_here, hub_paths, pins_of
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.tree import to_data
from rlinf_core.errors import ConfigError, PlacementError, RLinfError
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import Job
from rlinf_core.job.recipe import Recipe
from rlinf_core.node.environment import forwarded_values
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.suggest import quoted

# Modules that every driver imports.
_DRIVER_MODULES: Final = ("ray", "torch", "numpy", "safetensors")


def obstacle(recipe: Recipe) -> str | None:
    """Return in a few words why this interpreter cannot run a recipe; None if it can."""
    if recipe.program is None:
        return "it has no program in this version; its files can only be validated and laid out"
    missing = missing_modules(_DRIVER_MODULES)
    return f"needs {quoted(missing)}, {absence(missing[0])}" if missing else None


def check_has_program(recipe: Recipe) -> None:
    """Check that this version can run a recipe.

    Raises:
        RLinfError: the recipe has no program.
    """
    if recipe.program is None:
        raise RLinfError(
            f"recipe `{recipe.name}` cannot be run yet",
            why="it has no program in this version; its files can only be validated and laid out",
            help="use `rlinf train --dry-run`, or another recipe: `rlinf train` lists them",
        )


def check_installed() -> None:
    """Check that this interpreter has the packages of every driver.

    Raises:
        RLinfError: packages are missing; `help` holds the install command.
    """
    missing = missing_modules(_DRIVER_MODULES)
    if missing:
        what = f"training needs {quoted(missing)}, {absence(missing[0])}"
        raise RLinfError(what, help=f"run `{install_command(*missing)}`")


def recipe_of(job: Job) -> Recipe:
    """Return the recipe that a file selects.

    Raises:
        ConfigError: the file selects no recipe.
    """
    if job.recipe is None:
        raise ConfigError(
            "the file selects no recipe, so there is nothing to run",
            where=job.name,
            help="add `recipe: NAME` to it, or pass `recipe=NAME`; `rlinf train` lists the names",
        )
    return job.recipe


def recipes_result() -> Result:
    """Return the installed recipes with their default configs; report recipes that cannot be loaded."""
    installed: list[Recipe] = []
    for name in recipe_names():
        try:
            installed.append(find_recipe(name))
        except ConfigError as error:
            console.error_block(error.message, why=error.why, do=error.help)
    records = [
        {
            "name": recipe.name,
            "summary": recipe.summary,
            "default_config": recipe.default_config,
            "runnable": obstacle(recipe) is None,
            "obstacle": obstacle(recipe),
        }
        for recipe in installed
    ]

    def text() -> str:
        rows = [(recipe.name, _config_of(recipe), recipe.summary) for recipe in installed]
        table = console.table(("recipe", "config", "what"), rows, keep=(0, 1))
        reasons = [f"`{one.name}` cannot be run: {why}" for one in installed if (why := obstacle(one)) is not None]
        return "\n\n".join([table, _shipped_table(), *reasons])

    hint = "\n`rlinf train NAME` runs one; `rlinf inspect config NAME` shows its values."
    return Result(text, {"schema": "rlinf.recipes/1", "recipes": records}, notes=(hint,))


def _shipped_table() -> str:
    """Return the names of the shipped configs, a row for each folder."""
    rows: dict[str, list[str]] = {}
    # Configs without a recipe are in no folder, and come last.
    for name in sorted(shipped_configs(), key=lambda name: "/" not in name):
        folder, slash, last = name.rpartition("/")
        rows.setdefault(folder + slash, []).append(last)
    return console.table(("shipped configs", ""), [(folder, ", ".join(names)) for folder, names in rows.items()])


def _config_of(recipe: Recipe) -> str:
    """Return the argument that selects a recipe's default config."""
    own = recipe.default_config
    return f"recipe={recipe.name}" if "\n" in own else shown(Path(own))


def with_hub_pins(job: Job, file: str, overrides: Sequence[str], *, trains: bool = True) -> Job:
    """Return a job with its hub names pinned to commits; fetch their content if the job runs on this machine alone.

    Args:
        job: the job of `file`, without errors.
        file, overrides: the arguments with which the job was loaded.
        trains: whether the job reads its training data.

    Raises:
        ConfigError: a name is not in the cache of huggingface_hub, and cannot be fetched.
    """
    unread = () if trains or job.recipe is None else tuple(tuple(key.split(".")) for key in job.recipe.training_data)

    def read(config: object) -> list[HubPath]:
        return [path for at, path in hub_paths(config) if not any(at[: len(key)] == key for key in unread)]

    if job.tree is None or not read(job.config):
        return job
    stdin = next((source.text.encode() for source in job.sources if source.kind == "stdin"), None)
    # If there are several machines, each fetches what its own workers read.
    alone = job.cluster is not None and job.cluster.num_nodes == 1
    for name, kind in dict.fromkeys((path.name, path.kind) for path in read(job.config) if alone and not path.is_here):
        console.message(f"fetching `{name}`, a {kind} of the HuggingFace Hub, into its cache")
    pins = pins_of(read(job.config), job.tree, lambda path: commit_of(path, fetches=alone))
    pinned = load(file, (*overrides, *pins), stdin=stdin) if pins else job
    missing = [path for path in read(pinned.config) if alone and not path.is_here]
    for path in missing:
        ensure_here(path)
    # Load the job again, so that the recipe's rules check the fetched content.
    return load(file, (*overrides, *pins), stdin=stdin) if missing else pinned


_RESUME: Final = "runner.resume_dir"
# The weights that training starts from; an evaluation of a file takes them if it names no others.
_INITIAL: Final = "actor.checkpoint_load_path"
# Keys of `runner` about the length of training, checkpoints and reports.
_RUNNER: Final = (
    *("max_epochs", "max_steps", "max_restarts", "max_staleness", "max_failed_fraction"),
    *("val_check_interval", "val_before_train", "only_eval", "profiler", "on_hang", "trace", "metrics_port", "logger"),
    *("save_interval", "save_on_interrupt", "save_format", "keep_checkpoints", "snapshot_interval", "skip_checks"),
)
_TRAINING: Final = (
    _RESUME,
    *(f"runner.{name}" for name in _RUNNER),
    *(f"actor.{name}" for name in ("optim", "checkpoint_save_path", "global_batch_size", "micro_batch_size")),
    "algorithm",
)
# Keys of `env.train` that evaluations use, too.
_OF_EVALUATIONS: Final = (
    *("seed", "auto_reset", "ignore_terminations", "reward_coef", "success_reward"),
    *("num_processes", "simulator_timeout"),
)
# Keys of `algorithm` that affect how a policy acts.
_ACTING: Final = ("algorithm.loss_type", "algorithm.normalize_observations")


def refuse_unused(job: Job, overrides: Sequence[str], command: str, *, of_run: bool, checkpoint: str | None) -> None:
    """Refuse arguments that a command ignores, and a file's `runner.resume_dir`, which it does not use as weights.

    Args:
        job: the job with the arguments.
        overrides: `key=value` and `~key` arguments.
        command: the name of the command.
        of_run: whether the job comes from a run.
        checkpoint: the checkpoint given on the command line.

    Raises:
        ConfigError: a key has no effect.
    """
    for argument in overrides:
        key = argument.lstrip("+~").partition("=")[0]
        starts = key == _INITIAL and (command != "eval" or of_run or checkpoint is not None)
        if key == _RESUME or not (starts or _ignored(key, command, of_run=of_run)):
            continue
        remedy = "name the weights with `--checkpoint`" if starts else "remove it"
        if key.startswith("env."):
            other = "eval" if key.startswith("env.train") else "train"
            remedy = f"write `env.{other}{key[len('env.') :].removeprefix('train').removeprefix('eval')}`"
        raise ConfigError(
            f"`{key}` has no effect on `rlinf {command}`", where=f"the argument `{argument}`", help=remedy
        )
    written = any(argument.lstrip("+").partition("=")[0] == _RESUME for argument in overrides)
    named = _resumed(job)
    if named is not None and (written or (checkpoint is None and not of_run)):
        raise ConfigError(
            f"`{_RESUME}` is where training continues: `rlinf {command}` does not take its weights from there",
            where=_RESUME,
            help=f"name them with `--checkpoint {'RUN' if named == 'auto' else named}`, and remove the key",
        )


def _resumed(job: Job) -> str | None:
    """Return the file's `runner.resume_dir`, even if it cannot be resumed from."""
    data = cast("dict[str, Any]", to_data(job.tree)) if job.tree is not None else {}
    runner = data.get("runner")
    named = cast("dict[str, Any]", runner).get("resume_dir") if isinstance(runner, dict) else None
    return None if named is None else str(named)


def _ignored(key: str, command: str, *, of_run: bool) -> bool:
    if _within(key, "env.eval"):
        return command == "record"
    if _within(key, "env.train"):
        # In a file, `env.eval` inherits from `env.train`. In a run's file it only uses the keys about counting steps,
        # and the seed, which determines the new starts.
        return of_run and command != "record" and key.removeprefix("env.train.") not in _OF_EVALUATIONS
    return any(_within(key, name) for name in _TRAINING) and not any(_within(key, name) for name in _ACTING)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def chosen(arguments: list[str]) -> tuple[str, Sequence[str]]:
    """Return the file and the overrides of a command line, with the folder of `--runs-dir`."""
    files, overrides = split_files(arguments)
    if len(files) != 1:
        message = f"one file at a time, not {len(files)}: {', '.join(files)}" if files else "name a file or a recipe"
        raise typer.BadParameter(f"{message}, as in `rlinf train embodied`")
    named = [f"runner.logger.log_path={json.dumps(str(folder))}" for folder in run_lookup.named_folder]
    return file_of_recipe(files[0], [*named, *overrides])


def start(
    file: str,
    overrides: Sequence[str],
    assume: Sequence[str] | None,
    *,
    dry_run: bool,
    detach: bool,
    already_shown: bool = False,
) -> Result | int:
    """Train a job and return the exit code, or return only its plan.

    Args:
        file, overrides, assume: the arguments of the command line.
        dry_run: whether to return only the plan.
        detach: whether to train in the background.
        already_shown: whether the user has seen the file's warnings and its plan.

    Raises:
        RLinfError: the job cannot be started.
        typer.Exit: the file has errors, which were printed on standard error.
    """
    job = load(file, overrides, assume)
    if job.recipe is not None and not dry_run:
        check_has_program(job.recipe)
    parts = sound(job)
    if not (console.verbosity.quiet or already_shown):
        show_findings(job, Severity.WARNING)
    recipe = recipe_of(job)
    forwarded_values(parts.cluster.forward_env, os.environ)  # refuses unset ones before anything is started
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
    """Print the placement in a few lines, if the file determines it."""
    if console.verbosity.quiet:
        return
    try:
        console.message(f"{_plan(parts, file)}\n")
    except PlacementError:
        # Undeclared accelerators are counted after the nodes have started.
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
            "config": config_record(values),
        }

    return Result(text, record, notes=("\nnothing was started, and nothing written",))
