"""Paths as typed in overrides and references: `cluster.node_groups[0].label`.

    PATH  := NAME (("." NAME) | INDEX)*
    NAME  := bare | quoted          quoted: "..." with \\" \\\\ \\n \\r \\t, or '...' taken literally
    INDEX := "[" digits "]"         an item of a list, counted from 0

A bare name may contain anything but white space and `. [ ] { } = " '`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rlinf_core.config.source import NotationError
from rlinf_core.config.tree import Path

_ESCAPES: Final = {'"': '"', "\\": "\\", "n": "\n", "r": "\r", "t": "\t"}
_NOT_BARE: Final = frozenset(".[]{}=\"'")
_MAX_DIGITS: Final = 9


class PathSyntaxError(NotationError):
    """A path with invalid syntax."""


class Step(NamedTuple):
    """One segment of a path; `start` and `end` are its offsets, quotes and brackets included."""

    segment: str | int
    start: int
    end: int


def parse_path(text: str, start: int = 0, stop: str = "") -> tuple[tuple[Step, ...], int]:
    """Read a path from offset `start` up to the first character of `stop` outside quotes, or to the end of the text.

    Returns:
        The steps, at least one, and the offset where the path ended.

    Raises:
        PathSyntaxError: there is no path, or what follows it is neither a path nor a stop.
    """
    if text.startswith("[", start):
        raise PathSyntaxError("a path starts with a name, not with an index", start, start + 1)
    steps = [_name(text, start, stop)]
    at = steps[-1].end
    while at < len(text) and text[at] not in stop:
        if text[at] == ".":
            steps.append(_name(text, at + 1, stop))
        elif text[at] == "[":
            steps.append(_index(text, at))
        else:
            raise PathSyntaxError(f"`{text[at]}` is not valid here", at, at + 1, "names are separated by `.`")
        at = steps[-1].end
    return tuple(steps), at


def to_path(steps: tuple[Step, ...]) -> Path:
    return tuple(step.segment for step in steps)


def _name(text: str, start: int, stop: str) -> Step:
    quote = text[start : start + 1]
    if quote in ('"', "'"):
        return _quoted_name(text, start, quote)
    end = start
    while end < len(text) and text[end] not in stop and text[end] not in _NOT_BARE and not text[end].isspace():
        end += 1
    if end > start:
        return Step(text[start:end], start, end)
    if text[start : start + 1] == "[":
        raise PathSyntaxError("remove the `.` before the index", start - 1, start, "write `list[0].key`")
    if start < len(text) and text[start] not in stop and text[start] != ".":
        first_character = "white space" if text[start].isspace() else f"`{text[start]}`"
        raise PathSyntaxError(f"a name cannot start with {first_character}", start, start + 1, "put the name in quotes")
    raise PathSyntaxError("a name is missing here", start, start + 1)


def _quoted_name(text: str, start: int, quote: str) -> Step:
    name = ""
    at = start + 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at] == "\\":
            escape = _ESCAPES.get(text[at + 1 : at + 2])
            if escape is None:
                raise PathSyntaxError(
                    f"`{text[at : at + 2]}` is not an escape", at, at + 2, 'inside quotes write `\\\\` or `\\"`'
                )
            name += escape
            at += 2
        else:
            name += text[at]
            at += 1
    if at >= len(text):
        raise PathSyntaxError("this quote is never closed", start, len(text))
    return Step(name, start, at + 1)


def _index(text: str, start: int) -> Step:
    close = text.find("]", start)
    if close < 0:
        raise PathSyntaxError("this `[` is never closed", start, len(text))
    digits = text[start + 1 : close]
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_DIGITS:
        raise PathSyntaxError(
            f"`{digits}` is not the index of a list item", start, close + 1, "indexes are `[0]`, `[1]`, ..."
        )
    return Step(int(digits), start, close + 1)
