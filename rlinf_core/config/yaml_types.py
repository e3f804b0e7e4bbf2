"""Types of YAML values: the core schema of YAML 1.2 (chapter 10.3), of plain scalars and of tags, and nothing else.

`on`, `yes`, `1_000`, `0b11`, `1:2` and `2024-01-01` are therefore text, and `010` is ten. Other tags are refused.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "unknown", "mismatch"]
Resolved: TypeAlias = "bool | int | float | str | None"

_CORE = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(("str", "int", "float", "bool", "null"))
_COLLECTION_TAGS = frozenset(("map", "seq"))
# What may stand before the content of a node: an anchor, a tag, blanks and comments.
_PROPERTY = re.compile(r"&[^ \t\r\n,\[\]{}]+|!<[^>]*>|![^ \t\r\n,\[\]{}]*|[ \t\r\n]+|(?<=[ \t\r\n])#[^\n]*")
_BLANKS = " \t\r\n"
_TAG_ENDS = _BLANKS + ",[]{}"
# Tags of other tools, and what to write here instead.
_HELP = {
    "!env": "write `${env:NAME}` for a variable of the environment",
    "!include": "write `extends: FILE` at the top level to build on another file",
}


def find_properties(
    text: str, start: int, end: int, *, has_anchor: bool, has_tag: bool
) -> tuple[tuple[int, int] | None, int]:
    """Return the position of a node's tag, if any, and of its content, `end` at most.

    `start` is where the parser starts the node: at its first property, or at its anchor even when a tag precedes that.
    Only the node's own properties are skipped: the first key of a mapping may have some too.
    """
    tag = _tag_before(text, start) if has_anchor and has_tag else None
    at = start
    while at < end and (match := _PROPERTY.match(text, at)):
        first = match[0][0]
        if first == "!":
            if not has_tag or tag is not None:
                break
            tag = match.span()
        elif first == "&":
            if not has_anchor:
                break
            has_anchor = False
        at = match.end()
    return tag, min(at, end)


def _tag_before(text: str, at: int) -> tuple[int, int] | None:
    """Return where the tag is that stands right before `at`."""
    end = at
    while end and text[end - 1] in _BLANKS:
        end -= 1
    start = end
    if text.endswith(">", 0, end):
        start = max(text.rfind("!<", 0, end), 0)
    while start and text[start - 1] not in _TAG_ENDS:
        start -= 1
    return (start, end) if text.startswith("!", start, end) else None


def tagged_scalar(tag: str, raw: str) -> tuple[Verdict, Resolved, bool]:
    """Return the meaning of a tagged scalar: verdict, value, and whether it was resolved rather than taken as text."""
    name = _core_name(tag)
    if name == "str":
        return "ok", raw, False
    if name is None or name not in _SCALAR_TAGS:
        return ("unknown" if name is None else "mismatch"), raw, False
    value = resolve_plain(raw)
    is_bool = isinstance(value, bool)
    if name == "float" and isinstance(value, int) and not is_bool:
        try:
            value = float(value)
        except OverflowError:
            return "mismatch", raw, False
    fits = {
        "int": isinstance(value, int) and not is_bool,
        "float": isinstance(value, float),
        "bool": is_bool,
        "null": value is None,
    }
    return ("ok", value, True) if fits[name] else ("mismatch", raw, False)


def collection_tag(tag: str, *, is_mapping: bool) -> Verdict:
    """Return whether a tag fits a mapping or a list."""
    name = _core_name(tag)
    if name is None:
        return "unknown"
    return "ok" if name == ("map" if is_mapping else "seq") or tag == "!" else "mismatch"


def tag_help(tag: str) -> str:
    """Return the replacement for an unknown tag, given as written."""
    return _HELP.get(tag.lower(), "remove the tag, or quote the value if the `!` belongs to it")


def _core_name(tag: str) -> str | None:
    """Return the name of a core tag, None for any other; a lone `!` says that a scalar is text."""
    if tag == "!":
        return "str"
    name = tag.removeprefix(_CORE)
    return name if name != tag and name in _SCALAR_TAGS | _COLLECTION_TAGS else None


_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# A scalar that starts otherwise is text, which spares most scalars the regular expressions.
_NUMBER_STARTS = frozenset("0123456789+-.")
_DECIMAL = re.compile(r"[-+]?[0-9]+", re.ASCII)
_OCTAL = re.compile(r"0o[0-7]+", re.ASCII)
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NANS = frozenset((".nan", ".NaN", ".NAN"))

# Python refuses to convert longer ones to and from text (sys.set_int_max_str_digits); no setting is that large.
_LONGEST_INTEGER = 1000


def resolve_plain(raw: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar. An integer of more than 1000 digits stays text."""
    if raw in _NULLS:
        return None
    if raw[0] not in _NUMBER_STARTS:
        return _BOOLS.get(raw, raw)
    if _DECIMAL.fullmatch(raw):
        return int(raw) if len(raw) <= _LONGEST_INTEGER else raw
    if _FLOAT.fullmatch(raw):
        return float(raw)
    if len(raw) <= _LONGEST_INTEGER:
        if _OCTAL.fullmatch(raw):
            return int(raw[2:], 8)
        if _HEXADECIMAL.fullmatch(raw):
            return int(raw[2:], 16)
    if _INFINITY.fullmatch(raw):
        return float("-inf") if raw[0] == "-" else float("inf")
    return float("nan") if raw in _NANS else raw
