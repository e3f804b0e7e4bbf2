"""Key names of related projects, which findings suggest ours for, and keys of ours that are read at another place.

The command line provides them, and the models hold only our own names. They are loaded when a file has an unknown key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlinf_core.config.diagnostics import Diagnostics
    from rlinf_core.config.tree import MappingNode, Path


class Renamed(NamedTuple):
    """A tree in which every key stands where it is read.

    Attributes:
        tree: the tree; keys keep their spans.
        moved: where keys stood that another section has, each with its path in `tree`.
    """

    tree: MappingNode
    moved: dict[Path, Path]

    def path(self, path: Path) -> Path:
        """Return the path in `tree` of what stood at `path` before."""
        for size in range(len(path), 0, -1):
            if path[:size] in self.moved:
                return (*self.moved[path[:size]], *path[size:])
        return path


class SectionNames(NamedTuple):
    """Keys that sections do not have, by what becomes of them.

    Attributes:
        names: names that related projects give fields, each with its field.
        moved: keys that are in another section here, each with its path.
        unavailable: keys that have no counterpart here, each with what to do instead.
        same: such keys, each with the values by which it says what is so anyway.
        accepted: likewise, for keys that a file of ours may have; a key of `means` or `former` may have any.
        means: keys of ours that are read as one of another section, each with its path.
        former: keys of the release before, each with its path now, which are read with a warning. Keys of a section
            that is gone are read as those of the section there.
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
        """Return `tree` with the keys that are read as ones of another section there, and without keys that say what is
        so anyway.

        A key that one file sets at both places is reported. Of a file and its base, or an override, the later wins.
        """
        ...

    def names_at(self, annotations: Iterable[object]) -> SectionNames:
        """Return the names for all sections among `annotations`."""
        ...

    def places_of_other_name(self, model: type[BaseModel], name: str) -> list[tuple[str, str]]:
        """Return the sections in which `name` stands for a field, with the field, shallowest path first."""
        ...


_load: Callable[[], ForeignNames] | None = None


def use(load: Callable[[], ForeignNames]) -> None:
    """Use the names that `load` returns, which is called at the first unknown key."""
    global _load
    _load = load


def foreign_names() -> ForeignNames | None:
    """Return the source of names; None where none is in use."""
    return None if _load is None else _load()


def names_at(annotations: Iterable[object]) -> SectionNames:
    """Return the names for all sections among types; empty where no source is in use."""
    source = foreign_names()
    return source.names_at(annotations) if source else SectionNames({}, {}, {}, {}, {}, {}, {})
