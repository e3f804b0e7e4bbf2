"""Types of YAML values: only the core schema of YAML 1.2 (chapter 10.3), for plain scalars and tags.

`on`, `yes`, `1_000`, `0b11`, `1:2` and `2024-01-01` are therefore text, and `010` is ten. Other tags are rejected.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "unknown", "mismatch"]
Resolved: TypeAlias = "bool | int | float | str | None"

_CORE = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(("str", "int", "float", "bool", "null"))
# What may precede the content of a node: an anchor, a tag, blanks and comments.
_PROPERTY = re.compile(r"&[^ \t\r\n,\[\]{}]+|!<[^>]*>|![^ \t\r\n,\[\]{}]*|[ \t\r\n]+|(?<=[ \t\r\n])#[^\n]*")
_LAST_TAG = re.compile(r"(?:!<[^>\n]*>|![^ \t\r\n,\[\]{}]*)(?=[ \t\r\n]*\Z)")
_LONGEST_TAG = 1000
# Tags of other tools, with our replacement.
_HELP = {
    "!env": "write `${env:NAME}` for a variable of the environment",
    "!include": "write `extends: FILE` at the top level to build on another file",
}


def find_properties(
    text: str, start: int, end: int, has_anchor: bool, has_tag: bool
) -> tuple[tuple[int, int] | None, int]:
    """Return the position of a node's tag, if any, and of its content, `end` at most.

    `start` is where the parser starts the node: at its first property, or at its anchor even when a tag precedes that.
    Only the node's own properties are skipped: the first key of a mapping may have properties too.
    """
    tag: tuple[int, int] | None = None
    if has_anchor and has_tag and (match := _LAST_TAG.search(text[:start], max(0, start - _LONGEST_TAG))):
        tag = match.span()
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


def tagged_value(tag: str, raw: str, kind: str) -> tuple[Verdict, Resolved, bool]:
    """Return the meaning of a tag on a scalar, "map" or "seq": verdict, value of a scalar, and whether it was resolved
    rather than taken as text.
    """
    # A lone `!` makes a scalar text, and has no meaning for a collection.
    name = ("str" if kind == "scalar" else kind) if tag == "!" else tag.removeprefix(_CORE)
    if name not in {*_SCALAR_TAGS, "map", "seq"} or (name == tag != "!"):
        return "unknown", raw, False
    if kind != "scalar" or name == "str" or name not in _SCALAR_TAGS:
        return ("ok" if name == kind or (kind, name) == ("scalar", "str") else "mismatch"), raw, False
    value = resolve_plain(raw)
    if name == "float" and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            return "mismatch", raw, False
    if type(value) is {"int": int, "float": float, "bool": bool}.get(name, type(None)):
        return "ok", value, True
    return "mismatch", raw, False


def tag_help(tag: str) -> str:
    """Return the remedy for an unknown tag."""
    return _HELP.get(tag.lower(), "remove the tag, or quote the value if the `!` belongs to it")


_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# A scalar with another first character is text, which avoids the regular expressions for most scalars.
_NUMBER_STARTS = frozenset("0123456789+-.")
_DECIMAL = re.compile(r"[-+]?[0-9]+", re.ASCII)
_OCTAL = re.compile(r"0o[0-7]+", re.ASCII)
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NANS = frozenset((".nan", ".NaN", ".NAN"))

# Python does not convert longer ones from and to text (sys.set_int_max_str_digits); no setting is that large.
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
