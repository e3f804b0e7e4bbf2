"""Items that processes died of: each that was there at several deaths is tried alone, and set aside if it kills again.

A process that works at many items at once does not report which of them ends it. So all that it had are suspected at
its second death; a further death while it has one alone is that item's own. Where a process reports which one it was
at, its third death is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, TypeVar

T = TypeVar("T")
# Deaths at which an item was there, after which it is tried alone.
SUSPECTED: Final = 2


class Suspects(Generic[T]):
    """The deaths of each item's processes so far. Pure."""

    def __init__(self) -> None:
        self._deaths: dict[str, list[str]] = {}
        self._items: dict[str, T] = {}
        self._set_aside: set[str] = set()

    @property
    def set_aside(self) -> frozenset[str]:
        """The names of the items that are no longer processed."""
        return frozenset(self._set_aside)

    def died_of(self, items: Mapping[str, T], reason: str) -> None:
        """Note the death of a process that had these items, by their names."""
        for name, item in items.items():
            if name not in self._set_aside:
                self._deaths.setdefault(name, []).append(reason)
                self._items[name] = item

    def due(self) -> dict[str, T]:
        """Return the items that are to be tried alone, by their names."""
        return {name: self._items[name] for name, deaths in self._deaths.items() if len(deaths) >= SUSPECTED}

    def died_of_one(self, name: str, item: T, reason: str) -> list[str]:
        """Note the death of a process that is known to have died of one item.

        Returns:
            How all its processes died, if the item is set aside now; else nothing.
        """
        if name in self._set_aside:
            return []
        if len(self._deaths.get(name, ())) >= SUSPECTED:
            return self.killed(name, reason)
        self.died_of({name: item}, reason)
        return []

    def lived(self, name: str) -> None:
        """Forget the deaths at which an item was there: a process had it alone, and lives."""
        self._forget(name)

    def killed(self, name: str, reason: str) -> list[str]:
        """Set an item aside, of which a process died that had it alone; return how all its processes died."""
        deaths = [*self._deaths.get(name, ()), reason]
        self._set_aside.add(name)
        self._forget(name)
        return deaths

    def _forget(self, name: str) -> None:
        self._deaths.pop(name, None)
        self._items.pop(name, None)
