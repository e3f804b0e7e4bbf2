"""Syntax of references: `${section.key}`, `${env:NAME}`, `${env:NAME:-default}`, and `$${` for a literal `${`.

`${oc.env:NAME}` and `${oc.env:NAME,default}`, as OmegaConf writes them, mean the same as the two with `env:`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from rlinf_core.config.composing.paths import PathSyntaxError, Step, parse_path
from rlinf_core.config.source import NotationError

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


class ReferenceSyntaxError(NotationError):
    """A `${` that does not start a valid reference."""

    def __init__(self, message: str, start: int, end: int, help: str | None = _FORMS) -> None:
        super().__init__(message, start, end, help)


def has_references(text: str) -> bool:
    """Return whether `text` contains a reference or an escaped one."""
    return "${" in text


def escape_references(text: str) -> str:
    """Return the text that resolves to `text`."""
    return text.replace("${", "$${")


def split_references(text: str) -> list[str | Reference]:
    """Return the literal pieces of a text, unescaped, and the references between them, in order.

    Raises:
        ReferenceSyntaxError: a `${` does not start a valid reference.
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
        raise ReferenceSyntaxError(f"there is no resolver `{other[1]}`", start, other.end())
    if text.startswith("${.", start):
        help = "references are absolute: write the full path, `${section.key}`"
        raise ReferenceSyntaxError("a reference cannot start with `.`", start, closed + 1 or len(text), help)
    try:
        steps, end = parse_path(text, start + 2, stop="}")
    except PathSyntaxError as error:
        if closed < 0:
            raise _unterminated(text, start) from error
        end = max(closed + 1, error.end)
        raise ReferenceSyntaxError(
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
        raise ReferenceSyntaxError(message, start, closed + 1)
    default = match["default"]
    if "${" in (default or ""):
        message = "a default cannot contain another reference"
        raise ReferenceSyntaxError(message, start, closed + 1, "write a literal default")
    if default and opening == "${oc.env:" and len(default) > 1 and default[0] == default[-1] and default[0] in "\"'":
        default = default[1:-1]
    return Reference(start, match.end(), (), match["name"], default)


def _unterminated(text: str, start: int) -> ReferenceSyntaxError:
    return ReferenceSyntaxError(
        "this `${` is never closed", start, len(text.rstrip()), "add `}`, or write `$${` for `${`"
    )
