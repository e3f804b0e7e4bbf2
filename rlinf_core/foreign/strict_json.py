"""A strict reader of untrusted JSON: files, replies of servers, lines of a protocol.

`json.loads` reads `NaN` and `1e999`, keeps the last of two equal keys, and returns text that cannot be encoded. Deep
nesting makes it raise RecursionError, and a long integer a ValueError about digits. This reader raises one error for
all of these, which says what is wrong and where.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn, TypeVar, cast

# Levels of nested lists and objects, since code that walks through a value recurses for each level.
MAX_DEPTH: Final = 100
# An integer with 309 digits, which may exceed the largest float.
_LONG: Final = re.compile("[1-9][0-9]{308}")


N = TypeVar("N", bound=float)


class BadJsonError(ValueError):
    """The text is not JSON, or holds an unusable value; the message is a sentence without its subject."""


def load_json(text: str | bytes, *, non_finite: bool = False, number: Callable[[str], float] = float) -> object:
    """Return the value of a JSON text; bytes must be UTF-8. A byte order mark is ignored.

    Args:
        text: the whole text.
        non_finite: whether to accept `NaN`, `Infinity` and `-Infinity`, as in model configurations that Python wrote.
        number: the function from the text of a number with a point or exponent to its value.

    Raises:
        BadJsonError: the text is not JSON, repeats a key, is nested more than `MAX_DEPTH` levels deep, or holds a
            number that is not finite, an integer beyond the float range (if `number` is not `float`: of more than 4300
            digits, Python's limit), or half of a character (`"\\ud800"`).
    """
    if isinstance(text, bytes):
        if (other := wide_encoding(text)) is not None:
            raise BadJsonError(f"is {other} text, not UTF-8")
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadJsonError(f"is not UTF-8 text: byte {error.start}") from None
    text = text.removeprefix("\ufeff")
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=number if non_finite else partial(_held_by_float, number=number),
            parse_int=partial(_held_by_float, number=int) if number is float and _LONG.search(text) else None,
            parse_constant=None if non_finite else _refuse,
        )
    except BadJsonError:
        raise
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.rstrip() else ""
        raise BadJsonError(f"is not JSON: {error.msg.removesuffix(' at')} at {line}column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise BadJsonError("holds an integer of too many digits") from None
    halves = "\\ud" in text or "\\uD" in text or not _whole(text)
    if halves or text.count("[") + text.count("{") > MAX_DEPTH:
        _check(value, halves)
    return value


def load_json_object(text: str | bytes, *, non_finite: bool = False) -> dict[str, Any]:
    """Return the fields of a JSON object.

    Raises:
        BadJsonError: see `load_json`; or the value is not an object.
    """
    value = load_json(text, non_finite=non_finite)
    if not isinstance(value, dict):
        raise BadJsonError("is not a JSON object, `{...}`")
    return cast("dict[str, Any]", value)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys: set[str] = set()
        twice = next(name for name, _ in pairs if name in keys or keys.add(name))
        raise BadJsonError(f"names the key {twice[:60]!a} twice")
    return fields


def _held_by_float(digits: str, number: Callable[[str], N]) -> N:
    value = number(digits)
    if abs(value) > sys.float_info.max:
        raise BadJsonError(f"holds a number that is too large: {digits[:20]}")
    return value


def _refuse(name: str) -> NoReturn:
    raise BadJsonError(f"holds {name}, which is not valid JSON")


def _too_deep() -> BadJsonError:
    return BadJsonError(f"is nested more than {MAX_DEPTH} levels deep")


def _check(value: object, halves: bool) -> None:
    """Check the depth of a value and, if `halves` is set, that its texts can be encoded."""
    level: list[object] = [value]
    for depth in range(MAX_DEPTH + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                fields = cast("dict[str, object]", item)
                below.extend(fields.values())
                if halves:
                    below.extend(fields)
            elif isinstance(item, list):
                below.extend(cast("list[object]", item))
            elif halves and isinstance(item, str) and not _whole(item):
                raise BadJsonError(f"holds half of a character: {item[:40]!a}")
            if depth == MAX_DEPTH and isinstance(item, dict | list):
                raise _too_deep()
        level = below


def _whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# Encodings by byte order mark. UTF-32 comes first, since its mark can begin with that of UTF-16.
_MARKS: Final = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
# Encodings by which bytes are zero in a first character below U+0100, such as `{`.
_ZEROS: Final = (
    ((False, True, True, True), "UTF-32"),
    ((True, True, True, False), "UTF-32"),
    ((False, True), "UTF-16"),
    ((True, False), "UTF-16"),
)


def wide_encoding(start: bytes) -> str | None:
    """Return `UTF-16` or `UTF-32` if the first bytes of a text show it, with or without a byte order mark; else None.

    Text in UTF-16 without a mark is valid UTF-8, with a NUL beside each letter.
    """
    marked = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    zeros = tuple(not byte for byte in start[:4])
    return marked or next((name for pattern, name in _ZEROS if zeros[: len(pattern)] == pattern), None)
