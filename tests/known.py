"""Values that a test knows to be there."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


def known(value: _T | None) -> _T:
    """Return a value that must not be None."""
    assert value is not None
    return value
