"""Types of plain (unquoted) scalars: the core schema of YAML 1.2 (chapter 10.3) and nothing else.

`on`, `yes`, `1_000`, `0b11`, `1:2` and `2024-01-01` are therefore text, and `010` is the number ten.
"""

from __future__ import annotations

import re

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
