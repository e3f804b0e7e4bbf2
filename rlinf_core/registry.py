"""Registries of objects by the names that configurations use: built-in, registered, or imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Generic, TypeVar, cast

from rlinf_core.errors import ConfigError
from rlinf_core.suggest import did_you_mean, quoted, short_repr

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
