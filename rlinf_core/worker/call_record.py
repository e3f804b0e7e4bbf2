"""Durations of the timed calls of this process, by tag and rows: what `profile.json` of a run is made of."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

# Calls whose durations are kept of each tag and size, the newest ones.
_KEPT: Final = 64
# Sizes up to this are kept apart; larger ones by their two leading digits.
_EXACT: Final = 100
# Tags and sizes that are kept; what comes beyond is not.
_MOST_KEYS: Final = 400


class CallRecord(NamedTuple):
    """Calls of one tag with about as many rows.

    Attributes:
        tag: the name of the timer.
        rows: rows of a call on average; 0: it has none.
        calls: how many there were.
        seconds: their sum.
        newest: seconds of the newest of them.
    """

    tag: str
    rows: float
    calls: int
    seconds: float
    newest: tuple[float, ...]


class _Calls:
    __slots__ = ("calls", "newest", "rows", "seconds")

    def __init__(self) -> None:
        self.calls, self.rows, self.seconds = 0, 0.0, 0.0
        self.newest: deque[float] = deque(maxlen=_KEPT)


_calls: dict[tuple[str, int], _Calls] = {}


def size_of(rows: int) -> int:
    """Return the size that calls with that many rows are counted under."""
    if rows < _EXACT:
        return rows
    unit = 10 ** (len(str(rows)) - 2)
    return rows // unit * unit


def forget_calls() -> None:
    """Forget the calls so far, as those of an earlier run in this process."""
    _calls.clear()


def add_call(tag: str, rows: int, seconds: float) -> None:
    """Count a call that took that long."""
    size = size_of(rows)
    kept = _calls.get((tag, size))
    if kept is None:
        if len(_calls) >= _MOST_KEYS:
            return
        kept = _calls.setdefault((tag, size), _Calls())
    kept.calls += 1
    kept.rows += rows
    kept.seconds += seconds
    kept.newest.append(seconds)


def call_records() -> list[CallRecord]:
    """Return the calls of this process so far."""
    return [
        CallRecord(tag, kept.rows / kept.calls, kept.calls, kept.seconds, tuple(kept.newest))
        for (tag, _), kept in list(_calls.items())
        if kept.calls
    ]
