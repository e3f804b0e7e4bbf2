"""Modules found and read without an import: neither they nor a package around them run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rlinf_core.foreign.files import read_bounded
from rlinf_core.process.import_path import is_unnamed, named_path

_MOST_BYTES = 4 << 20


def locate(module: str, *, named: bool = False) -> ModuleSpec | None:
    """Return where a module is, or None; `importlib.util.find_spec` would import the packages around it.

    Args:
        module: its full name.
        named: whether to search only folders that somebody has named, not the working folder of a command.
    """
    package, _, _ = module.rpartition(".")
    folders: Sequence[str] | None = None
    if package:
        around = locate(package, named=named)
        folders = list(around.submodule_search_locations or ()) if around is not None else []
        # A package of rlinf's may also extend into the working folder.
        folders = [folder for folder in folders if not (named and is_unnamed(Path(folder).parent))]
    spec = _spec(module, folders, named) if folders or not package else None
    # Some modules are only made by their package, as `os.path`.
    return spec if spec is not None or named else getattr(sys.modules.get(module), "__spec__", None)


def _spec(module: str, folders: Sequence[str] | None, named: bool) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is PathFinder:
            # The full name of a folder without `__init__.py` would have its package looked up in `sys.modules`.
            path = folders if folders is not None else named_path() if named else None
            spec = PathFinder.find_spec(module.rpartition(".")[2], path)
        else:
            try:
                spec = finder.find_spec(module, folders)
            except KeyError:  # such a look-up
                continue
        if spec is not None:
            return spec
    return None


def syntax_tree(spec: ModuleSpec) -> ast.Module | None:
    """Return the syntax tree of a module; None if it has no Python source.

    Raises:
        ValueError: the source cannot be read or is not Python; the text says why.
    """
    origin = spec.origin
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        return ast.parse(read_bounded(origin, _MOST_BYTES), origin)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno} of {origin} is not Python: {error.msg}") from None
    except OSError as error:
        raise ValueError(f"{origin} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{origin} cannot be read: {error or type(error).__name__}") from None
