"""Recipes of the user's own, which a file names as `package.module:name`.

A file that somebody received must not run code that came along with it. The module is therefore found without an
import, in folders that the user has named; its source must assign a `Recipe` to the name; and only then it is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path

from rlinf_core.errors import ConfigError
from rlinf_core.process.import_path import add_working_folder, is_unnamed, named_path, working_folder
from rlinf_core.process.module_source import locate, syntax_tree

FORM = "your own recipe is written `package.module:name`"
_RECIPE = "Recipe"


class UnknownRecipeError(ConfigError):
    """No recipe of this name: no package offers it, or what a file names is not a recipe."""


def import_own_recipe(target: str) -> object:
    """Return what `package.module:name` names, whose source says that it is a recipe.

    Raises:
        UnknownRecipeError: there is no such module, or its source assigns no recipe to the name. Nothing was imported.
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
            return getattr(import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"recipe `{target}` cannot be loaded: {type(error).__name__}: {error}",
            why=f"`{module}` is {spec.origin}",
            help="install missing packages, or fix the module",
        ) from error


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
        UnknownRecipeError: it does not, or has no source.
    """
    missing, origin = f"there is no recipe `{target}`", spec.origin
    try:
        tree = syntax_tree(spec)
    except ValueError as error:
        raise UnknownRecipeError(f"{missing}: {error}", help="fix the module") from None
    if tree is None:
        raise UnknownRecipeError(f"{missing}: `{module}` has no Python source", help=FORM)
    body = tree.body
    values = list(_assigned(body, name))
    if not values:
        others = [other for other, value in _assignments(body) if _makes_recipe(value)]
        help = f"its recipe is `{module}:{others[0]}`" if others else f"assign it there: `{name} = Recipe(...)`"
        raise UnknownRecipeError(f"{missing}: {origin} assigns no `{name}`", help=help)
    if not all(map(_makes_recipe, values)):
        raise UnknownRecipeError(
            f"{missing}: `{name}` of {origin} is not a Recipe",
            help=f"assign it at the module's top level from a call: `{name} = Recipe(...)`",
        )


def _assigned(body: Iterable[ast.stmt], name: str) -> list[ast.expr]:
    return [value for other, value in _assignments(body) if other == name]


def _assignments(body: Iterable[ast.stmt]) -> Generator[tuple[str, ast.expr], None, None]:
    """Yield the names that the top level of a module assigns, each with its value."""
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        elif isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, value


def _makes_recipe(value: ast.expr) -> bool:
    """Return whether an expression is the call `Recipe(...)` or `package.Recipe(...)`."""
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)) == _RECIPE


@contextmanager
def _named_folders_only() -> Generator[None, None, None]:
    """Import from the folders that somebody has named, also what the module imports in turn."""
    left_out = working_folder()
    sys.path[:] = named_path()
    try:
        yield
    finally:
        add_working_folder(left_out)
