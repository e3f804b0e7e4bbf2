"""Checks of the arguments of channel operations."""

from __future__ import annotations

import math
import operator
from ast import literal_eval
from typing import Final, TypeAlias, cast

from rlinf_core.address import check_name
from rlinf_core.errors import InvalidNameError
from rlinf_core.suggest import short_repr
from rlinf_core.waiting import plain_seconds

Key: TypeAlias = "str | int | float | bytes | tuple[Key, ...] | None"
"""What names a queue within a channel: any hashable plain value."""

# What the text of a key that is not text begins with: an invisible separator, which shows nowhere.
_NO_TEXT: Final = "\u2063"


def amount(value: object) -> float | None:
    """Return an argument as a finite number from 0; None if it is not one.

    Whatever is one number will do, as an array or a tensor of one element; text and `10**400` will not.
    """
    try:
        number = value if type(value) is int or type(value) is float else _number(value)
        return number if number >= 0 and float(number) < math.inf else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # Of a number with a complex part or of several elements, each library says it in its own way.
        return None


def _number(value: object) -> float:
    if isinstance(value, str | bytes | bytearray | complex):
        raise TypeError
    return float(value)  # pyright: ignore[reportArgumentType] - who has no `__float__` raises


def checked_weight(weight: float) -> float:
    """Return the weight of an item.

    Raises:
        ValueError: it is not a finite number from 0.
    """
    number = amount(weight)
    if number is None:
        raise ValueError(f"`weight` is {short_repr(weight)}, expected a finite number from 0")
    return number


def checked_batch_weight(weight: float) -> float:
    """Return the weight of a batch.

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
        ValueError: it is not a finite number from 0, or a tensor.
    """
    return None if timeout is None else plain_seconds(timeout)


def checked_bound(maxsize: int) -> int:
    """Return how many items each key holds.

    Raises:
        ValueError: it is not an integer >= 0.
    """
    number = amount(maxsize)
    if number is None or number != int(number):
        raise ValueError(f"`maxsize` is {short_repr(maxsize)}, expected an integer >= 0 (0 means no bound)")
    return int(number)


def checked_key(key: Key) -> str:
    """Return a key as the text by which its queue travels. Keys that are equal, as 1 and 1.0, have the same one.

    Raises:
        TypeError: it is not a plain value: another process could not tell that two such keys are equal.
        ValueError: it is text that cannot be sent.
    """
    if not isinstance(key, str):
        return f"{_NO_TEXT}{_canonical(key)!r}"
    if key.startswith(_NO_TEXT):
        raise ValueError(f"a key must not begin with the invisible character {_NO_TEXT!r}")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a key is text, and {short_repr(key)} holds half a character") from None
    return key


def key_of(text: str) -> Key:
    """Return the key that `checked_key` made a text of."""
    return cast("Key", literal_eval(text[1:])) if text.startswith(_NO_TEXT) else text


def _canonical(key: object) -> object:
    """Return a plain value so that equal values have one `repr`."""
    if key is None or isinstance(key, str | bytes):
        return key
    if isinstance(key, tuple):
        return tuple(_canonical(item) for item in cast("tuple[object, ...]", key))
    try:
        return operator.index(key)  # pyright: ignore[reportArgumentType] - whatever is a whole number, as numpy's
    except TypeError:
        pass
    if isinstance(key, float) and math.isfinite(key):
        return int(key) if key.is_integer() else float(key)
    raise TypeError(f"a key is text, a number, None, bytes or a tuple of such, not {short_repr(key)}")


def check_channel_name(name: str) -> None:
    """Check that a channel may have this name.

    Raises:
        InvalidNameError: it is not text, empty, holds a `:`, or what cannot be seen.
    """
    check_name(name, "channel")
    if not name.isprintable():
        raise InvalidNameError(
            f"{short_repr(name)} is not a valid name of a channel", help="each character of a name can be seen in print"
        )
