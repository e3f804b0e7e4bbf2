"""Checks that a job can run here, before anything is started or written; names of the Hub are pinned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.suggest import quoted

if TYPE_CHECKING:
    from rlinf_core.config.sections.hub_names import HubPath
    from rlinf_core.job.load import Job
    from rlinf_core.job.recipe import Recipe


# Modules that every driver imports.
_DRIVER_MODULES: Final = ("ray", "torch", "numpy", "safetensors")


def obstacle(recipe: Recipe) -> str | None:
    """Return why this interpreter cannot run a recipe, in a few words; None if it can."""
    if recipe.program is None:
        return "it has no program in this version; its files can only be validated and laid out"
    missing = missing_modules(_DRIVER_MODULES)
    return f"needs {quoted(missing)}, {absence(missing[0])}" if missing else None


def check_has_program(recipe: Recipe) -> None:
    """Check that this version can run a recipe.

    Raises:
        RLinfError: it has no program.
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
        raise RLinfError(
            f"training needs {quoted(missing)}, {absence(missing[0])}",
            help=f"run `{install_command(*missing)}`",
        )


def recipe_of(job: Job) -> Recipe:
    """Return the recipe that a file selects.

    Raises:
        ConfigError: it selects none.
    """
    if job.recipe is None:
        raise ConfigError(
            "the file selects no recipe, so there is nothing to run",
            where=job.name,
            help="add `recipe: NAME` to it, or pass `recipe=NAME`; `rlinf train` lists the names",
        )
    return job.recipe


def recipes_result() -> Result:
    """Return the installed recipes, with the configs that they start from; one that cannot be loaded is reported."""
    from rlinf_core.job.find_recipe import find_recipe, recipe_names

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
        return "\n\n".join([table, *reasons])

    hint = "\n`rlinf train RECIPE` runs one; `rlinf inspect config CONFIG` shows its defaults."
    return Result(text, {"schema": "rlinf.recipes/1", "recipes": records}, notes=(hint,))


def _config_of(recipe: Recipe) -> str:
    """Return what names the config that a recipe starts from."""
    from rlinf_cli.live.run_summary import shown

    own = recipe.default_config
    return f"recipe={recipe.name}" if "\n" in own else shown(Path(own))


def with_hub_pins(job: Job, file: str, overrides: Sequence[str], *, trains: bool = True) -> Job:
    """Return a job with its names of the hub pinned to commits, and fetched if it runs on this machine alone.

    Args:
        job: the job of `file`, without errors.
        file, overrides: how it was loaded.
        trains: whether the data of training are read.

    Raises:
        ConfigError: a name is neither in the cache of huggingface_hub, nor can it be fetched.
    """
    from rlinf_cli.job.job_file import load
    from rlinf_core.config.sections.hub_names import commit_of, ensure_here, hub_paths, pins_of

    unread = () if trains or job.recipe is None else tuple(tuple(key.split(".")) for key in job.recipe.training_data)

    def read(config: object) -> list[HubPath]:
        return [path for at, path in hub_paths(config) if not any(at[: len(key)] == key for key in unread)]

    if job.tree is None or not read(job.config):
        return job
    stdin = next((source.text.encode() for source in job.sources if source.kind == "stdin"), None)
    # Of several machines each fetches what its own workers read.
    alone = job.cluster is not None and job.cluster.num_nodes == 1
    for name, kind in dict.fromkeys((path.name, path.kind) for path in read(job.config) if alone and not path.is_here):
        console.message(f"fetching `{name}`, a {kind} of the HuggingFace Hub, into its cache")
    pins = pins_of(read(job.config), job.tree, lambda path: commit_of(path, fetches=alone))
    pinned = load(file, (*overrides, *pins), stdin=stdin) if pins else job
    missing = [path for path in read(pinned.config) if alone and not path.is_here]
    for path in missing:
        ensure_here(path)
    # What was fetched is checked by the rules of the recipe.
    return load(file, (*overrides, *pins), stdin=stdin) if missing else pinned
