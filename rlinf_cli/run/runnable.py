"""Checks that a recipe can run here, before anything is started or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rlinf_core.errors import RLinfError
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.suggest import quoted

if TYPE_CHECKING:
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
            help="use `rlinf train --dry-run`, or another recipe from `rlinf recipes`",
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
