"""Key names of related projects. The command line provides them; the models hold only our own names.

They are loaded when a file has an unknown key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.tree import MappingNode, Path


class Renamed(NamedTuple):
    """A tree in which every key has our name.

    Attributes:
        tree: the tree; keys keep their spans.
        paths: the paths of renamed keys, with our names above them, and the name each had.
        moved: where keys stood that another section has, each with its path in `tree`.
    """

    tree: MappingNode
    paths: dict[Path, str]
    moved: dict[Path, Path]

    def path(self, path: Path) -> Path:
        """Return the path in `tree` of what stood at `path` before."""
        for size in range(len(path), 0, -1):
            if path[:size] in self.moved:
                return (*self.moved[path[:size]], *path[size:])
        ours: Path = ()
        for segment in path:
            ours = (
                *ours,
                next((new[-1] for new, old in self.paths.items() if old == segment and new[:-1] == ours), segment),
            )
        return ours


class ForeignNames(Protocol):
    """A source of foreign names. `annotations` are the types allowed at the key's place."""

    def with_our_names(self, model: type[BaseModel], tree: MappingNode, diagnostics: Diagnostics) -> Renamed:
        """Return `tree` with our names, without keys that have no effect here.

        A key that one file sets under both names is reported. Of a file and its base, or an override, the later wins.
        """
        ...

    def other_names_of(self, annotations: Iterable[object]) -> dict[str, str]:
        """Return the aliases of fields, each with its field."""
        ...

    def accepted_keys(self, annotations: Iterable[object]) -> dict[str, Sequence[object]]:
        """Return the keys that sections lack and that may be written all the same, each with the values that it may
        have; none for a key that is read as one of another section.
        """
        ...

    def moved_keys(self, annotations: Iterable[object]) -> dict[str, str]:
        """Return the keys that are in another section here, each with its path."""
        ...

    def unavailable_keys(self, annotations: Iterable[object]) -> dict[str, str]:
        """Return the keys that have no counterpart here, each with what to do instead."""
        ...

    def places_of_other_name(self, model: type[BaseModel], name: str) -> list[tuple[str, str]]:
        """Return the sections in which `name` is an alias of a field, with the field, shallowest path first."""
        ...


_load: Callable[[], ForeignNames] | None = None


def use(load: Callable[[], ForeignNames]) -> None:
    """Use the names that `load` returns, which is called at the first unknown key."""
    global _load
    _load = load


def foreign_names() -> ForeignNames | None:
    """Return the source of names; None where none is in use."""
    return None if _load is None else _load()
