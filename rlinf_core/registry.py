"""Registries of objects by the names that configurations use: built-in, registered, or imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

from rlinf_core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A registry of one kind of object.

    Built-in objects are imported on first use. A name with a colon is imported, too: that is how a configuration names
    a user's object.

    Args:
        what: the kind of object, for messages, as in `advantage`.
        known: built-in objects by name, as `package.module:name`.
    """

    def __init__(self, what: str, known: Mapping[str, str]) -> None:
        self._what = what
        self._known = dict(known)
        self._registered: dict[str, T] = {}

    def names(self) -> list[str]:
        """Return all names, in alphabetical order."""
        return sorted({*self._known, *self._registered})

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under `name`, and returns it unchanged.

        Raises:
            ConfigError: the name is taken, empty, or has a colon.
        """
        if not name or ":" in name:
            raise ConfigError(
                f"`{name}` is not a valid {self._what} name", help="a name must not be empty or contain a colon"
            )

        def add(value: T) -> T:
            if name in self._known:
                raise ConfigError(f"{self._what} `{name}` comes with rlinf already", help="use another name")
            if self._registered.get(name, value) is not value:
                raise ConfigError(f"{self._what} `{name}` is registered twice", help="rename one of them")
            self._registered[name] = value
            return value

        return add

    def get(self, name: str) -> T:
        """Return the object registered as `name`, or import `package.module:name`.

        Raises:
            ConfigError: the name is unknown, or cannot be imported.
        """
        if name in self._registered:
            return self._registered[name]
        target = self._known.get(name, name)
        if ":" in target:
            return cast("T", import_target(target, self._what))
        from rlinf_core.suggest import did_you_mean, quoted

        choices = f"known: {quoted(self.names())}; your own: `package.module:name`"
        raise ConfigError(f"unknown {self._what} `{name}`", help=did_you_mean(name, self.names()) or choices)


def import_target(target: str, what: str) -> object:
    """Import the object `package.module:name`; `what` is the kind of object, for messages.

    Raises:
        ConfigError: the module cannot be imported, or does not define the name.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except ConfigError as error:
        raise ConfigError(f"{what} `{target}` cannot be loaded: {error.message}", help=error.help) from error
    except Exception as error:
        raise ConfigError(
            f"{what} `{target}` cannot be loaded: {type(error).__name__}: {error}",
            help=f"install missing packages, or check that `{module}` can be imported here and defines `{name}`",
        ) from error
