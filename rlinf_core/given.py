"""Validation of arguments from untyped callers: read as what they have to be, and shown in errors."""

from __future__ import annotations

import operator


def whole(value: object) -> int | None:
    """Return what was given as a whole number, as ints and those of NumPy are; None for what is none, as 1.0 and
    True.
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):
        return None


def spelled(value: object) -> str:
    """Return what was given, on one line that is not long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - Python spells no number of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
