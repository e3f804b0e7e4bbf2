"""Descriptions for `rlinf ps` of what a process holds besides its own memory and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_MOST_LINES: Final = 9
_LONGEST: Final = 120
_holders: list[Callable[[], Sequence[str]]] = []


def show_holdings(holder: Callable[[], Sequence[str]]) -> None:
    """Have a function say what this process holds now, a line for each thing; it is called from another thread."""
    _holders.append(holder)


def holdings() -> tuple[str, ...]:
    """Return lines of what this process holds, the first of many."""
    lines = [line[:_LONGEST] for holder in tuple(_holders) for line in _said(holder)]
    rest = len(lines) - _MOST_LINES
    return (*lines[:_MOST_LINES], f"and {rest} more") if rest > 0 else tuple(lines)


def _said(holder: Callable[[], Sequence[str]]) -> Sequence[str]:
    try:
        return holder()
    except Exception as error:  # noqa: BLE001 - of the recipe; who asks what the process does is answered all the same
        return (f"what it holds is not known: {type(error).__name__}: {error}",)
