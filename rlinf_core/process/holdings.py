"""Descriptions for `rlinf ps` of the resources that a process holds besides its own memory and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_MOST_LINES: Final = 9
_LONGEST: Final = 120
_holders: list[Callable[[], Sequence[str]]] = []


def show_holdings(holder: Callable[[], Sequence[str]]) -> None:
    """Register a function that returns a line for each resource of this process; it is called from another thread."""
    _holders.append(holder)


def holdings() -> tuple[str, ...]:
    """Return a line for each resource that this process holds; of more than 9, the first 9 and how many more."""
    lines = [line[:_LONGEST] for holder in tuple(_holders) for line in _said(holder)]
    rest = len(lines) - _MOST_LINES
    return (*lines[:_MOST_LINES], f"and {rest} more") if rest > 0 else tuple(lines)


def _said(holder: Callable[[], Sequence[str]]) -> Sequence[str]:
    try:
        return holder()
    except Exception as error:  # noqa: BLE001 - an error in a recipe's function must not hide the other lines
        return (f"what it holds is not known: {type(error).__name__}: {error}",)
