"""Paths and references as they are typed, in overrides and in values.

    PATH  := NAME (("." NAME) | INDEX)*
    NAME  := bare | quoted          quoted: "..." with \\" \\\\ \\n \\r \\t, or '...' taken literally
    INDEX := "[" digits "]"         an item of a list, counted from 0

A bare name may contain anything but white space and `. [ ] { } = " '`. References are `${section.key}`, `${env:NAME}`,
`${env:NAME:-default}`, and `$${` for a literal `${`; `${oc.env:NAME}` and `${oc.env:NAME,default}`, as OmegaConf writes
them, mean the same as the two with `env:`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from rlinf_core.config.tree import NotationError, Path

_ESCAPES: Final = {'"': '"', "\\": "\\", "n": "\n", "r": "\r", "t": "\t"}
_BARE: Final = re.compile(r"""[^\s.\[\]{}="']+""")
# A quoted name without its last quote.
_QUOTED: Final = {'"': re.compile(r'"(?:[^"\\]|\\["\\nrt])*'), "'": re.compile("'[^']*")}
_MAX_DIGITS: Final = 9


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
        NotationError: there is no path, or an invalid character follows it.
    """
    if text.startswith("[", start):
        raise NotationError("a path starts with a name, not with an index", start, start + 1)
    steps = [_name(text, start, stop)]
    at = steps[-1].end
    while at < len(text) and text[at] not in stop:
        if text[at] == ".":
            steps.append(_name(text, at + 1, stop))
        elif text[at] == "[":
            steps.append(_index(text, at))
        else:
            raise NotationError(f"`{text[at]}` is not valid here", at, at + 1, "names are separated by `.`")
        at = steps[-1].end
    return tuple(steps), at


def to_path(steps: tuple[Step, ...]) -> Path:
    return tuple(step.segment for step in steps)


def _name(text: str, start: int, stop: str) -> Step:
    first = text[start : start + 1]
    if (quoted := _QUOTED[first].match(text, start) if first in _QUOTED else None) is not None:
        return _quoted_name(text, start, quoted.end())
    if (bare := _BARE.match(text, start)) is not None:
        return Step(bare[0], start, bare.end())
    if first == "[":
        raise NotationError("remove the `.` before the index", start - 1, start, "write `list[0].key`")
    if first and first not in stop and first != ".":
        shown = "white space" if first.isspace() else f"`{first}`"
        raise NotationError(f"a name cannot start with {shown}", start, start + 1, "put the name in quotes")
    raise NotationError("a name is missing here", start, start + 1)


def _quoted_name(text: str, start: int, end: int) -> Step:
    """Return the quoted name from `start`, whose closing quote should be at `end`."""
    if end == len(text):
        raise NotationError("this quote is never closed", start, end)
    if text[end] == "\\":
        help = 'inside quotes write `\\\\` or `\\"`'
        raise NotationError(f"`{text[end : end + 2]}` is not an escape", end, end + 2, help)
    name = text[start + 1 : end]
    if text[start] == '"':
        name = re.sub(r"\\(.)", lambda escape: _ESCAPES[escape[1]], name)
    return Step(name, start, end + 1)


def _index(text: str, start: int) -> Step:
    close = text.find("]", start)
    if close < 0:
        raise NotationError("this `[` is never closed", start, len(text))
    digits = text[start + 1 : close]
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_DIGITS:
        raise NotationError(
            f"`{digits}` is not the index of a list item", start, close + 1, "indexes are `[0]`, `[1]`, ..."
        )
    return Step(int(digits), start, close + 1)


_NAME: Final = r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
# The whole reference, by the prefix of the variable's name.
_VARIABLES: Final = {
    "${env:": re.compile(rf"\$\{{env:{_NAME}(:-(?P<default>[^}}]*))?\}}"),
    "${oc.env:": re.compile(rf"\$\{{oc\.env:\s*{_NAME}\s*(,\s*(?P<default>[^}}]*?)\s*)?\}}"),
}
_RESOLVER: Final = re.compile(r"\$\{([A-Za-z_][\w.]*):([^}]*)\}?")
_FORMS: Final = "write `${section.key}`, `${env:NAME}` or `${env:NAME:-default}`; `$${` is a literal `${`"


class Reference(NamedTuple):
    """`${...}` at the offsets `start` to `end` of a text: a path, or an environment variable with its default."""

    start: int
    end: int
    steps: tuple[Step, ...] = ()
    variable: str | None = None
    default: str | None = None


def has_references(text: str) -> bool:
    """Return whether `text` contains a reference or an escaped one."""
    return "${" in text


def escape_references(text: str) -> str:
    """Return the text that resolves to `text`."""
    return text.replace("${", "$${")


def split_references(text: str) -> list[str | Reference]:
    """Return the literal pieces of a text, unescaped, and the references between them, in order.

    Raises:
        NotationError: a `${` does not start a valid reference.
    """
    pieces: list[str | Reference] = []
    at = 0
    while (position := text.find("${", at)) >= 0:
        if position > at and text[position - 1] == "$":
            pieces.append(text[at : position - 1] + "${")
            at = position + 2
            continue
        if position > at:
            pieces.append(text[at:position])
        reference = _read(text, position)
        pieces.append(reference)
        at = reference.end
    if at < len(text):
        pieces.append(text[at:])
    return pieces


def _read(text: str, start: int) -> Reference:
    for opening in _VARIABLES:
        if text.startswith(opening, start):
            return _read_variable(text, start, opening)
    closed = text.find("}", start)
    other = _RESOLVER.match(text, start)
    if other is not None:
        raise NotationError(f"there is no resolver `{other[1]}`", start, other.end(), _FORMS)
    if text.startswith("${.", start):
        help = "references are absolute: write the full path, `${section.key}`"
        raise NotationError("a reference cannot start with `.`", start, closed + 1 or len(text), help)
    try:
        steps, end = parse_path(text, start + 2, stop="}")
    except NotationError as error:
        if closed < 0:
            raise _unterminated(text, start) from error
        end = max(closed + 1, error.end)
        raise NotationError(
            f"this is not a valid reference: {error.message}", start, end, error.help or _FORMS
        ) from error
    if end >= len(text):
        raise _unterminated(text, start)
    return Reference(start, end + 1, steps)


def _read_variable(text: str, start: int, opening: str) -> Reference:
    match = _VARIABLES[opening].match(text, start)
    closed = text.find("}", start)
    if closed < 0:
        raise _unterminated(text, start)
    if match is None:
        message = f"`{text[start + len(opening) : closed]}` is not the name of a variable"
        raise NotationError(message, start, closed + 1, _FORMS)
    default = match["default"]
    if "${" in (default or ""):
        message = "a default cannot contain another reference"
        raise NotationError(message, start, closed + 1, "write a literal default")
    if default and opening == "${oc.env:" and len(default) > 1 and default[0] == default[-1] and default[0] in "\"'":
        default = default[1:-1]
    return Reference(start, match.end(), (), match["name"], default)


def _unterminated(text: str, start: int) -> NotationError:
    return NotationError("this `${` is never closed", start, len(text.rstrip()), "add `}`, or write `$${` for `${`")
