"""Checks that a recipe can run here, before anything is started or written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.suggest import quoted

if TYPE_CHECKING:
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
