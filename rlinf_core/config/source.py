"""Source texts and positions in them.

A `SourceText` is a file, standard input, or the arguments of a command. A `Span` is a part of one of them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

OVERRIDES_NAME = "<overrides>"
STDIN_NAME = "<stdin>"
# The last number of a file's layer. Its bases have 0, 1, ... in that place, and so come first.
_OWN: Final = math.inf


class Position(NamedTuple):
    """A position in a text. Lines and columns count from 1, columns in code points."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True, eq=False)
class SourceText:
    """A text with its display name. Of kind "overrides", every line is a command-line argument.

    Attributes:
        own_layer: the layer of a file, see `layer`.
    """

    name: str
    text: str = field(repr=False)
    kind: Literal["file", "stdin", "overrides"] = "file"
    own_layer: tuple[float, ...] = field(default=(_OWN,), repr=False)

    @property
    def layer(self) -> tuple[float, ...]:
        """The precedence among the texts of a composed configuration; values of a greater layer win."""
        return (_OWN, _OWN) if self.kind == "overrides" else self.own_layer

    @property
    def is_quotable(self) -> bool:
        """Whether findings may show its lines: a base not named like a configuration may hold passwords."""
        return self.own_layer == (_OWN,) or self.name.endswith((".yaml", ".yml", ".json"))

    def as_base(self, of: SourceText, index: int) -> SourceText:
        """Return this text as base number `index` of the text `of`."""
        return replace(self, own_layer=(*of.own_layer[:-1], index, _OWN))

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(newline.end() for newline in re.finditer("\n", self.text))]

    def position(self, offset: int) -> Position:
        """Return the line and column of a code point offset; an offset past the end is the end."""
        offset = max(0, min(offset, len(self.text)))
        index = bisect_right(self._line_starts, offset) - 1
        return Position(index + 1, offset - self._line_starts[index] + 1)

    def line(self, number: int) -> str:
        """Return line `number` (from 1) without its line end."""
        start = self._line_starts[number - 1]
        end = self._line_starts[number] if number < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")


class NotationError(ValueError):
    """A text with invalid syntax: hosts, ranks, a path, a reference.

    Attributes:
        start, end: the invalid part, as offsets into the given text.
    """

    def __init__(self, message: str, start: int, end: int, help: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.start = start
        self.end = end
        self.help = help


class Span(NamedTuple):
    """The code points from `start` to before `end` of a source."""

    source: SourceText
    start: int
    end: int

    @property
    def begin(self) -> Position:
        return self.source.position(self.start)

    @property
    def finish(self) -> Position:
        """The position just after the last code point."""
        return self.source.position(self.end)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def part(self, start: int, end: int) -> Span:
        """Return the sub-span between two offsets relative to this one, clipped to it."""
        size = self.end - self.start
        start = max(0, min(start, size))
        return Span(self.source, self.start + start, self.start + max(start, min(end, size)))

    def __str__(self) -> str:
        return f"{self.source.name}:{self.begin}"
