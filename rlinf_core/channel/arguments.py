"""Checks of the arguments of channel operations."""

from __future__ import annotations

import math
import operator
from ast import literal_eval
from typing import TypeAlias, cast

from rlinf_core.suggest import short_repr
from rlinf_core.waiting import NO_TEXT, plain_seconds

Key: TypeAlias = "str | int | float | bytes | tuple[Key, ...] | None"
"""The name of a queue within a channel: any hashable plain value."""


def amount(value: object) -> float | None:
    """Return an argument as a finite number >= 0; None if it is not one.

    A NumPy scalar and a tensor of one element count as numbers; text and `10**400` do not.
    """
    try:
        number = value if type(value) is int or type(value) is float else _number(value)
        return number if number >= 0 and float(number) < math.inf else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # For several elements or a complex value, each library raises a different error.
        return None


def _number(value: object) -> float:
    if isinstance(value, str | bytes | bytearray | complex):
        raise TypeError
    return float(value)  # pyright: ignore[reportArgumentType] - who has no `__float__` raises


def checked_weight(weight: float) -> float:
    """Return the weight of an item as a plain number.

    Raises:
        ValueError: it is not a finite number >= 0.
    """
    number = amount(weight)
    if number is None:
        raise ValueError(f"`weight` is {short_repr(weight)}, expected a finite number from 0")
    return number


def checked_batch_weight(weight: float) -> float:
    """Return the weight of a batch as a plain number.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    number = amount(weight)
    if not number:
        raise ValueError(f"`batch_weight` is {short_repr(weight)}, expected a finite number above 0")
    return number


def checked_timeout(timeout: float | None) -> float | None:
    """Return a timeout in seconds, or None for the default.

    Raises:
        ValueError: it is not a finite number >= 0, or it is a tensor.
    """
    return None if timeout is None else plain_seconds(timeout)


def checked_bound(maxsize: int) -> int:
    """Return the number of items that each key may hold, as an int.

    Raises:
        ValueError: it is not an integer >= 0.
    """
    number = amount(maxsize)
    if number is None or number != int(number):
        raise ValueError(f"`maxsize` is {short_repr(maxsize)}, expected an integer >= 0 (0 means no bound)")
    return int(number)


def checked_key(key: Key) -> str:
    """Return the encoded form of a key, as text. Equal keys, such as 1 and 1.0, have the same form.

    Raises:
        TypeError: it is not a plain value: another process could not tell whether two such keys are equal.
        ValueError: it is text that cannot be encoded, or that begins like the encoded form of a key that is not text.
    """
    if not isinstance(key, str):
        return f"{NO_TEXT}{_canonical(key)!r}"
    if key.startswith(NO_TEXT):
        raise ValueError(f"a key must not begin with the invisible character {NO_TEXT!r}")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a key is text, and {short_repr(key)} holds half a character") from None
    return key


def key_of(text: str) -> Key:
    """Return the key whose encoded form is `text`, see `checked_key`."""
    return cast("Key", literal_eval(text[1:])) if text.startswith(NO_TEXT) else text


def _canonical(key: object) -> object:
    """Return an equal plain value, such that equal keys yield the same `repr`."""
    if key is None:
        return key
    # As plain text and bytes: subclasses such as NumPy's and those of enums have another `repr`.
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    if isinstance(key, tuple):
        return tuple(_canonical(item) for item in cast("tuple[object, ...]", key))
    try:
        return operator.index(key)  # pyright: ignore[reportArgumentType] - whatever is a whole number, as numpy's
    except TypeError:
        pass
    if isinstance(key, float) and math.isfinite(key):
        return int(key) if key.is_integer() else float(key)
    raise TypeError(f"a key is text, a number, None, bytes or a tuple of such, not {short_repr(key)}")
