"""The public names of a package: listed in its stub, and imported on first use.

A stub has a line `from MODULE import NAME as NAME` for each name, which type checkers read as well.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any


def public_names(
    package: str,
    file: str,
    of_others: Mapping[str, str] = MappingProxyType({}),
    former: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package, whose `__init__.py` is `file`.

    `of_others`: names of related projects that the package lacks, each with what to do instead. Importing such a name
    raises ImportError with that text; Python would replace the text of an AttributeError by its own.

    `former`: names that were public in the previous release, each with its new place: `MODULE` or `MODULE:NAME`. They
    work for one release, with a warning.
    """

    @cache
    def modules() -> dict[str, str]:
        """Return the module that defines each public name."""
        with open(os.path.splitext(file)[0] + ".pyi", encoding="utf-8") as stub:
            lines = [line.split() for line in stub if line.startswith("from ") and " as " in line]
        return {words[-1]: words[1] for words in lines}

    def get(name: str) -> Any:
        if name == "__all__":
            return list(modules())
        if name in of_others:
            raise ImportError(f"`{package}` has no `{name}`: {of_others[name]}")
        module = modules().get(name)
        if module is None:
            if name not in former:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return _former(package, name, *former[name].split(":"))
        defined = import_module(module)
        value = getattr(defined, name) if hasattr(defined, name) else import_module(f"{module}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(modules())

    return get, names


def _former(package: str, name: str, module: str, new: str = "") -> Any:
    """Return the object that a former name refers to, and warn where it is now."""
    where = f"`{new}`" if module == package else f"`{new or name}` of `{module}`"
    warnings.warn(f"`{name}` of `{package}` is now {where}; it goes with the next release", DeprecationWarning, 3)
    defined = import_module(module)
    return getattr(defined, new or name) if hasattr(defined, new or name) else import_module(f"{module}.{name}")
