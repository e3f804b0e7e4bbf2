"""Checks that a recipe can be run here, as far as that is known before anything is started or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rlinf_core.errors import RLinfError
from rlinf_core.process.requirements import install_command, missing_modules
from rlinf_core.suggest import quoted

if TYPE_CHECKING:
    from rlinf_core.job.recipe import Recipe

# The modules that the driver of any run imports.
_DRIVER_MODULES: Final = ("ray", "torch", "numpy")


def obstacle(recipe: Recipe) -> str | None:
    """Return why a recipe cannot be run by this interpreter, in a few words; None when it can."""
    if recipe.program is None:
        return "no program in this version; its files can be validated and laid out"
    missing = missing_modules(_DRIVER_MODULES)
    return f"needs {quoted(missing)}, which this Python does not have" if missing else None


def check_has_program(recipe: Recipe) -> None:
    """Refuse to run a recipe that this version cannot run anywhere.

    Raises:
        RLinfError: it has no program.
    """
    if recipe.program is None:
        raise RLinfError(
            f"recipe `{recipe.name}` cannot be run yet",
            why="it has no program in this version: its files can be validated and laid out",
            help="`rlinf train --dry-run` shows what would run; `rlinf recipes` lists the others",
        )


def check_installed() -> None:
    """Refuse to drive a run in an interpreter that lacks what every driver imports.

    Raises:
        RLinfError: packages are missing; `help` has the command that installs them.
    """
    missing = missing_modules(_DRIVER_MODULES)
    if missing:
        raise RLinfError(
            f"training needs {quoted(missing)}, which this Python does not have",
            help=f"run `{install_command(*missing)}`",
        )
