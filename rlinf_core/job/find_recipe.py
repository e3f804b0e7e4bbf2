"""Recipes by name: those of installed packages, and users' own.

A received file must not run code that came with it. Therefore the module of `package.module:name` is located without
an import, in folders that the user has named, and is only imported if its source assigns a `Recipe` to the name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import reduce
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final, cast

from rlinf_core.errors import ConfigError
from rlinf_core.job.recipe import Recipe
from rlinf_core.process.import_path import (
    add_working_folder,
    is_unnamed,
    locate,
    named_path,
    offered,
    syntax_tree,
    working_folder,
)
from rlinf_core.suggest import did_you_mean, quoted

FORM = "your own recipe is written `package.module:name`"
_RECIPE = "Recipe"


class UnknownRecipeError(ConfigError):
    """No recipe has this name: no package offers it, or the named object is not a recipe."""


def _own_recipe(target: str) -> Recipe:
    """Return the recipe that `package.module:name` names, after checking its source.

    Raises:
        UnknownRecipeError: there is no such module, or its source assigns no recipe to the name (in both cases nothing
            was imported), or the assigned object is not a `Recipe` of rlinf.
        ConfigError: the import failed.
    """
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise UnknownRecipeError(f"`{target}` is not the name of a recipe", help=FORM)
    spec = locate(module, named=True)
    if spec is None:
        raise _missing(target, module)
    _check_source(target, module, name, spec)
    try:
        with _named_folders_only():
            recipe = getattr(import_module(module), name)
    except Exception as error:
        message = f"recipe `{target}` cannot be loaded: {type(error).__name__}: {error}"
        help = "install missing packages, or fix the module"
        raise ConfigError(message, why=f"`{module}` is {spec.origin}", help=help) from error
    if not isinstance(recipe, Recipe):
        raise UnknownRecipeError(
            f"there is no recipe `{target}`: it is a {type(recipe).__name__}, not a Recipe of rlinf",
            help="make it by `Recipe(...)` of `rlinf_core`",
        )
    return _with_own_config(recipe, module)


def _missing(target: str, module: str) -> UnknownRecipeError:
    reason = f"there is no module `{module}`"
    help = "install the package, or name the folder that holds it: `PYTHONPATH=FOLDER rlinf ...`"
    file = Path(*module.split("."))
    if is_unnamed(Path.cwd()) and (file.is_dir() or file.with_suffix(".py").is_file()):
        reason = f"`{module}` is in the working folder, which is not on PYTHONPATH"
        help = "if you trust the code in it, name the folder: `PYTHONPATH=. rlinf ...`"
    return UnknownRecipeError(f"there is no recipe `{target}`: {reason}", help=help)


def _check_source(target: str, module: str, name: str, spec: ModuleSpec) -> None:
    """Refuse a module whose source does not assign a recipe to the name.

    Raises:
        UnknownRecipeError: the source does not assign a recipe to the name, or is missing or invalid.
    """
    missing, origin = f"there is no recipe `{target}`", spec.origin
    try:
        tree = syntax_tree(spec)
    except ValueError as error:
        raise UnknownRecipeError(f"{missing}: {error}", help="fix the module") from None
    if tree is None:
        raise UnknownRecipeError(f"{missing}: `{module}` has no Python source", help=FORM)
    assigned = list(_assignments(tree.body))
    values = [value for other, value in assigned if other == name]
    if not values:
        others = [other for other, value in assigned if _makes_recipe(value)]
        help = f"its recipe is `{module}:{others[0]}`" if others else f"assign it there: `{name} = Recipe(...)`"
        raise UnknownRecipeError(f"{missing}: {origin} assigns no `{name}`", help=help)
    if not all(map(_makes_recipe, values)):
        raise UnknownRecipeError(
            f"{missing}: `{name}` of {origin} is not a Recipe",
            help=f"assign it at the module's top level from a call: `{name} = Recipe(...)`",
        )


def _assignments(body: Iterable[ast.stmt]) -> Generator[tuple[str, ast.expr], None, None]:
    """Yield the names that the top level of a module assigns, each with its value."""
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and (value := statement.value) is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def _makes_recipe(value: ast.expr) -> bool:
    """Return whether an expression is a call `Recipe(...)` or `package.Recipe(...)`."""
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)) == _RECIPE


@contextmanager
def _named_folders_only() -> Generator[None, None, None]:
    """Restrict imports in this context, nested ones included, to the folders that the user named."""
    left_out = working_folder()
    sys.path[:] = named_path()
    try:
        yield
    finally:
        add_working_folder(left_out)


ENTRY_POINT_GROUP: Final = "rlinf.recipes"
_YAML: Final = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """Return the names of all installed recipes, in alphabetical order. Imports none of them."""
    return sorted(offered(ENTRY_POINT_GROUP))


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`, or the one that `package.module:name` names.

    Raises:
        UnknownRecipeError: the recipe does not exist; `help` suggests names.
        ConfigError: the recipe's package cannot be loaded.
    """
    if ":" in name:
        return _own_recipe(name)
    points = offered(ENTRY_POINT_GROUP)
    point = points.get(name)
    if point is None:
        choices = f"the recipes are {quoted(sorted(points))}" if points else "no installed package provides a recipe"
        choices = f"{choices}; {FORM}"
        raise UnknownRecipeError(f"there is no recipe `{name}`", help=did_you_mean(name, points) or choices)
    try:
        recipe = point.load()
    except Exception as error:
        message = f"recipe `{name}` cannot be loaded: {type(error).__name__}: {error}"
        help = "fix or remove the package that provides it"
        raise ConfigError(message, why=f"its entry point is `{point.value}`", help=help) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"recipe `{name}` cannot be loaded: `{point.value}` is not a Recipe",
            help="fix or remove the package that provides it",
        )
    return _with_own_config(recipe, point.module)


def find_variant(name: str, written: Callable[[str], object]) -> Recipe:
    """Return the recipe called `name`, or the one of its `variants` that a file selects.

    Args:
        name: the file's value of `recipe`.
        written: a function that returns the file's value of a key, such as `data.type`, or None.

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
    """Return the recipe whose default config `recipe=NAME` means, given the `key=value` arguments.

    Raises:
        ConfigError: see `find_recipe`; or its config is a file that is missing from the installed package.
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
    """Yield the texts in a value, recursively."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(cast("Mapping[str, object]", value).values()))
    elif isinstance(value, Iterable):
        for item in cast("Iterable[object]", value):
            yield from _texts(item)


def _with_own_config(recipe: Recipe, module: str) -> Recipe:
    """Return a recipe with its config file's path beside its module, unless only the working folder has the file."""
    if not recipe.default_config.endswith(_YAML):
        return recipe
    own = Path(str(sys.modules[module].__file__)).parent / recipe.default_config
    only_here = not own.exists() and Path(recipe.default_config).exists()
    return recipe if only_here else recipe._replace(default_config=str(own))
