"""Outcomes of the conversion, one for each key."""

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


class ReferenceText(str):
    """A reference in the form of rlinf, `${path}` or `${env:NAME}`, written as it is."""


@dataclass(frozen=True)
class NewValue:
    """A value of the new file.

    Attributes:
        path: its path there.
        value: the value, as written in the old file, references included; or a new one.
        note: the new meaning, if it changed.
        same: the value is that of the old key, so that references to that key may become references to this one.
    """

    path: Path
    value: ScalarNode | SequenceNode | str | int | float | bool | None
    note: str | None = None
    same: bool = False


@dataclass(frozen=True)
class LeftOut:
    """A key without a value in the new file; `reason` says why, and what to do instead. `quiet`: nothing is lost."""

    reason: str
    quiet: bool = False


@dataclass(frozen=True)
class Leaf:
    """A key of the composed file that holds a scalar, or a list of scalars."""

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
        fate: the outcome in one word.
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
        why: the reason, in words.
    """

    path: Path
    value: Any
    why: str
