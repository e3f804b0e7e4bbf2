"""Recipes by name: those that installed packages offer, and users' those own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any, Final, cast

from rlinf_core.errors import ConfigError
from rlinf_core.job.own_recipe import FORM, UnknownRecipeError, import_own_recipe
from rlinf_core.job.recipe import Recipe
from rlinf_core.process.entry_points import offered

ENTRY_POINT_GROUP: Final = "rlinf.recipes"
_YAML: Final = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """Return the names of all installed recipes, in alphabetical order. Imports none of them."""
    return sorted(offered(ENTRY_POINT_GROUP))


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`, or the one that `package.module:name` names.

    Raises:
        UnknownRecipeError: it does not exist; `help` suggests names.
        ConfigError: its package cannot be loaded.
    """
    if ":" in name:
        return _own_recipe(name)
    points = offered(ENTRY_POINT_GROUP)
    point = points.get(name)
    if point is None:
        from rlinf_core.suggest import did_you_mean, quoted

        choices = f"the recipes are {quoted(sorted(points))}" if points else "no installed package provides a recipe"
        choices = f"{choices}; {FORM}"
        raise UnknownRecipeError(f"there is no recipe `{name}`", help=did_you_mean(name, points) or choices)
    try:
        recipe = point.load()
    except Exception as error:
        raise ConfigError(
            f"recipe `{name}` cannot be loaded: {type(error).__name__}: {error}",
            why=f"its entry point is `{point.value}`",
            help="fix or remove the package that provides it",
        ) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"recipe `{name}` cannot be loaded: `{point.value}` is not a Recipe",
            help="fix or remove the package that provides it",
        )
    return _with_own_config(recipe, point.module)


def find_variant(name: str, written: Callable[[str], object]) -> Recipe:
    """Return the recipe called `name`, or the one of its `variants` that a file selects.

    Args:
        name: what the file says under `recipe`.
        written: returns the file's value of a key, such as `data.type`; None where it has none.

    Raises:
        ConfigError: see `find_recipe`.
    """
    recipe = find_recipe(name)
    for setting, variant in recipe.variants.items():
        key, _, pattern = setting.partition("=")
        if any(fnmatchcase(text, pattern) for text in _texts(written(key))):
            return find_recipe(variant)
    return recipe


def recipe_of(config: Any) -> Recipe:
    """Return the recipe of a validated file, or of any object with the same attributes; raises as `find_recipe`."""

    def value(key: str) -> object:
        return reduce(lambda part, name: getattr(part, name, None), key.split("."), config)

    return find_variant(str(config.recipe), value)


def started_recipe(name: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe whose default config `recipe=NAME` starts from, with these `key=value` arguments.

    Raises:
        ConfigError: see `find_recipe`; or its config is a file that its package was installed without.
    """
    values = dict(override.split("=", 1) for override in overrides if "=" in override)
    recipe = find_variant(name, lambda key: re.findall(r"[^\[\]\s,]+", values.get(key, "")))
    file = Path(recipe.default_config)
    if file.is_absolute() and file.suffix in _YAML and not file.exists():
        package = file.parent.name
        raise ConfigError(
            f"recipe `{name}` starts from `{file.name}`, which is not in `{file.parent}`",
            why="a package is installed with its Python files; others are named in its pyproject.toml",
            help=f'add `{package} = ["*.yaml"]` under `[tool.setuptools.package-data]`, and install the package again',
        )
    return recipe


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of a value: itself, or those of its items."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(cast("Mapping[str, object]", value).values()))
    elif isinstance(value, Iterable):
        for item in cast("Iterable[object]", value):
            yield from _texts(item)


def _own_recipe(target: str) -> Recipe:
    recipe = import_own_recipe(target)
    if not isinstance(recipe, Recipe):
        raise UnknownRecipeError(
            f"there is no recipe `{target}`: it is a {type(recipe).__name__}, not a Recipe of rlinf",
            help="make it by `Recipe(...)` of `rlinf_core`",
        )
    return _with_own_config(recipe, target.partition(":")[0])


def _with_own_config(recipe: Recipe, module: str) -> Recipe:
    """Return a recipe with the path of its config file beside its module, or from the working folder if only there."""
    if not recipe.default_config.endswith(_YAML):
        return recipe
    own = Path(str(sys.modules[module].__file__)).parent / recipe.default_config
    only_here = not own.exists() and Path(recipe.default_config).exists()
    return recipe if only_here else recipe._replace(default_config=str(own))
