"""Discovery of installed recipes through the entry point group `rlinf.recipes`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlinf_core.errors import ConfigError
from rlinf_core.job.recipe import Recipe

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP: Final = "rlinf.recipes"


class UnknownRecipeError(ConfigError):
    """No installed package offers a recipe of this name."""


def recipe_names() -> list[str]:
    """Return the names of all installed recipes, in alphabetical order. Imports none of them."""
    return sorted(_entry_points())


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`.

    Raises:
        UnknownRecipeError: there is none; `help` tells the near or known names.
        ConfigError: the package that offers it cannot be loaded.
    """
    points = _entry_points()
    point = points.get(name)
    if point is None:
        from rlinf_core.suggest import did_you_mean, quoted

        known = f"the recipes are {quoted(sorted(points))}" if points else "no installed package offers a recipe"
        raise UnknownRecipeError(f"there is no recipe `{name}`", help=did_you_mean(name, points) or known)
    try:
        recipe = point.load()
    except Exception as error:
        raise ConfigError(
            f"recipe `{name}` cannot be loaded: {type(error).__name__}: {error}",
            why=f"it is offered as `{point.value}`",
            help="repair or remove the package that offers it",
        ) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"recipe `{name}` cannot be loaded: `{point.value}` is not a Recipe",
            help="repair or remove the package that offers it",
        )
    return _with_own_config(recipe, point.module)


def _with_own_config(recipe: Recipe, module: str) -> Recipe:
    """Return a recipe that names the path of a config which lies beside its module; another name stays."""
    if not recipe.default_config.endswith((".yaml", ".yml")):
        return recipe
    own = Path(str(sys.modules[module].__file__)).parent / recipe.default_config
    return recipe._replace(default_config=str(own)) if own.exists() else recipe


def _entry_points() -> dict[str, EntryPoint]:
    # Imported here: a file without `recipe` needs no recipes.
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, point)
    return found
