"""Outcomes: what has become of each key of a file that is converted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rlinf_core.config.tree import Node, Path, ScalarNode, SequenceNode, format_path


class Fate(StrEnum):
    """The fate of a key, in a word or two."""

    CARRIED = "carried"
    RENAMED = "renamed"
    NOT_NEEDED = "not needed"
    LEFT_OUT = "not available"


@dataclass(frozen=True)
class NewValue:
    """A value of the new file.

    Attributes:
        path: where it stands there.
        value: as it stood in the old file, references included; or a new one.
        note: what it means now, where that is something else.
        same: the value is that of the old key, so that references to that key may become references to this one.
    """

    path: Path
    value: ScalarNode | SequenceNode | str | int | float | bool | None
    note: str | None = None
    same: bool = False


@dataclass(frozen=True)
class LeftOut:
    """No value of the new file; `reason` says why, and what to do instead. `quiet`: nothing is lost by it."""

    reason: str
    quiet: bool = False


@dataclass(frozen=True)
class Leaf:
    """A key of the composed file that holds a single value, or a list of such."""

    path: Path
    node: Node
    place: str = ""

    @property
    def name(self) -> str:
        """The path in words."""
        return format_path(self.path)


@dataclass(frozen=True)
class KeyOutcome:
    """The outcome for one key.

    Attributes:
        source: its path in the composed old file.
        fate: in one word.
        targets: the paths in the new file; empty where it was left out.
        reason: why it was left out.
        note: what has changed in its meaning.
        place: file and line of it.
    """

    source: str
    fate: Fate
    targets: tuple[str, ...] = ()
    reason: str | None = None
    note: str | None = None
    place: str = ""


class Added(NamedTuple):
    """A value of the new file that the old one does not have.

    Attributes:
        path, value: what is written.
        why: in words.
    """

    path: Path
    value: Any
    why: str
