"""Key names of related projects and of earlier releases, for findings that suggest our names, and aliases of our keys.

The command line provides them; the models hold only our own names. They are loaded when a file has an unknown key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.tree import MappingNode, Path


class Renamed(NamedTuple):
    """A tree with every key moved to the path where it is read.

    Attributes:
        tree: the tree; keys keep their spans.
        moved: the former paths of moved keys, each with the key's path in `tree`.
    """

    tree: MappingNode
    moved: dict[Path, Path]

    def path(self, path: Path) -> Path:
        """Return the path in `tree` of the value formerly at `path`."""
        for size in range(len(path), 0, -1):
            if path[:size] in self.moved:
                return (*self.moved[path[:size]], *path[size:])
        return path


class SectionNames(NamedTuple):
    """Foreign and former keys of sections, by their treatment.

    Attributes:
        names: related projects' names of fields, each with our field.
        moved: keys that belong to another section here, each with its path.
        unavailable: keys without a counterpart here, each with the remedy.
        same: keys without a counterpart, each with the values that state our fixed behavior.
        accepted: likewise, for keys that our own files may have; a key of `means` or `former` may have any value.
        means: keys of ours that are read as a key of another section, each with its path.
        former: keys of the previous release, each with its present path, which are read with a warning. Keys of a
            removed section are read in the section at its present path.
    """

    names: Mapping[str, str]
    moved: Mapping[str, str]
    unavailable: Mapping[str, str]
    same: Mapping[str, Sequence[object]]
    accepted: Mapping[str, Sequence[object]]
    means: Mapping[str, str]
    former: Mapping[str, str]


class ForeignNames(Protocol):
    """A source of foreign names. `annotations` are the types allowed at the key's place."""

    def with_our_names(self, model: type[BaseModel], tree: MappingNode, diagnostics: Diagnostics) -> Renamed:
        """Return `tree` with keys moved to the sections where they are read, and without keys that state our fixed
        behavior.

        A key that one file sets at both paths is reported. Between a file, its base and an override, the later wins.
        """
        ...

    def names_at(self, annotations: Iterable[object]) -> SectionNames:
        """Return the names for all sections among `annotations`."""
        ...

    def places_of_other_name(self, model: type[BaseModel], name: str) -> list[tuple[str, str]]:
        """Return the paths of sections in which `name` means a field, with the field, shallowest path first."""
        ...


_load: Callable[[], ForeignNames] | None = None


def use(load: Callable[[], ForeignNames]) -> None:
    """Use the names that `load` returns, which is called at the first unknown key."""
    global _load
    _load = load


def foreign_names() -> ForeignNames | None:
    """Return the source of names, or None if none is in use."""
    if _load is None:
        # A program that loads a file without a command reads the same keys.
        with suppress(ImportError):
            import_module("rlinf_cli")  # which calls `use`
    return None if _load is None else _load()


def names_at(annotations: Iterable[object]) -> SectionNames:
    """Return the names for all sections among `annotations`; empty if no source is in use."""
    source = foreign_names()
    return source.names_at(annotations) if source else SectionNames({}, {}, {}, {}, {}, {}, {})
