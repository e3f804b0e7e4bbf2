"""Conversion of arguments from untyped callers."""

from __future__ import annotations

import operator


def as_index(value: object) -> int | None:
    """Return a value as an int if it is a whole number, NumPy's included; None for all else, such as 1.0 and True."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):
        return None


def short_repr(value: object) -> str:
    """Return a short one-line representation of a value."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - Python does not format numbers of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
