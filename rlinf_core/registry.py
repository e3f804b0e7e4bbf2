"""Objects by name, imported on first use: registries of what configurations name, and public names of packages.

An object of a registry is built-in, registered, or imported. The public names of a package are listed in its stub, in a
line `from MODULE import NAME as NAME` for each, which type checkers read as well.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from rlinf_core.errors import ConfigError
from rlinf_core.suggest import did_you_mean, quoted, short_repr


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


T = TypeVar("T")


class Registry(Generic[T]):
    """A registry of one kind of object.

    Built-in objects are imported on first use. A name with a colon is imported, too: that is how a configuration names
    a user's object.

    Args:
        what: the kind of object, for messages, as in `advantage`.
        known: built-in objects by name, as `package.module:name`.
        bases: classes, as `package.module:Class`, of which a user's object must extend one; none: any class or function
            will do.
    """

    def __init__(self, what: str, known: Mapping[str, str], bases: Sequence[str] = ()) -> None:
        self._what = what
        self._known = dict(known)
        self._bases = tuple(bases)
        self._registered: dict[str, T] = {}

    def names(self) -> list[str]:
        """Return all names, in alphabetical order."""
        return sorted({*self._known, *self._registered})

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under `name`, and returns it unchanged.

        Raises:
            ConfigError: the name is empty or has a colon; the decorator raises it for a taken name.
        """
        if callable(name) or not name or ":" in name:
            what = f"{short_repr(name)} is not a valid {self._what} name"
            raise ConfigError(what, help='write it in brackets, as in `("mine")`, not empty and without a colon')

        def add(value: T) -> T:
            if name in self._known:
                raise ConfigError(f"{self._what} `{name}` comes with rlinf already", help="use another name")
            if self._registered.setdefault(name, value) is not value:
                raise ConfigError(f"{self._what} `{name}` is registered twice", help="rename one of them")
            return value

        return add

    def get(self, name: str) -> T:
        """Return the object registered as `name`, or import `package.module:name`.

        Raises:
            ConfigError: the name is unknown, cannot be imported, or names an unusable object.
        """
        if name in self._registered:
            _check_usable(self._registered[name], name, self._what, self._bases)
            return self._registered[name]
        if name in self._known or ":" in name:
            return cast("T", import_target(self._known.get(name, name), self._what, self._bases))
        choices = f"known: {quoted(self.names())}; your own: `package.module:name`"
        raise ConfigError(f"unknown {self._what} `{name}`", help=did_you_mean(name, self.names()) or choices)


def import_target(target: str, what: str, bases: Sequence[str] = ()) -> object:
    """Import the class or function `package.module:name`.

    Args:
        target: its module and name.
        what: the kind of object, for messages.
        bases: see `Registry`.

    Raises:
        ConfigError: the module cannot be imported, does not define the name, or defines something else under it.
    """
    module, _, name = target.partition(":")
    try:
        value: object = getattr(import_module(module), name)
    except ConfigError as error:
        raise ConfigError(f"{what} `{target}` cannot be loaded: {error.message}", help=error.help) from error
    except Exception as error:
        raise ConfigError(
            f"{what} `{target}` cannot be loaded: {type(error).__name__}: {error}",
            help=f"install missing packages, or check that `{module}` can be imported here and defines `{name}`",
        ) from error
    _check_usable(value, target, what, bases)
    return value


def _check_usable(value: object, name: str, what: str, bases: Sequence[str]) -> None:
    """Check that an object can be called, and extends one of `bases`."""
    if not callable(value):
        raise ConfigError(
            f"{what} `{name}` is an object of type `{type(value).__name__}`, not a class or a function",
            help="name the class or the function itself",
        )
    if not bases or (isinstance(value, type) and issubclass(value, tuple(_imported(bases)))):
        return
    differs = "a class that does not extend" if isinstance(value, type) else "a function, not a class that extends"
    extended = " or ".join(f"`{base.partition(':')[2]}` of `{base.partition(':')[0]}`" for base in bases)
    raise ConfigError(f"{what} `{name}` is {differs} {extended}", help="name a class that extends it")


def _imported(bases: Sequence[str]) -> list[type]:
    """Return those classes whose modules are imported: no object extends a class that is not imported."""
    modules = ((sys.modules.get(module), name) for module, _, name in (base.partition(":") for base in bases))
    return [getattr(module, name) for module, name in modules if module is not None]
