"""The limit of restarts of a run: in all, or of each component within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from rlinf_core.config.sections.runner import RestartLimit

_ALL: Final = ""


class Restart(NamedTuple):
    """A restart that is allowed: its number among those that count, from 1."""

    number: int
    of: int


class Restarts:
    """The restarts of a run so far.

    Args:
        limit: `runner.max_restarts`.
        clock: seconds, monotonic.
    """

    def __init__(self, limit: RestartLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: dict[str, list[float]] = {}

    def allow(self, component: str) -> Restart | None:
        """Count a restart after the death of a worker of `component`; return None, and count nothing, beyond the
        limit."""
        seconds, now = self._limit.seconds, self._clock()
        key = _ALL if seconds is None else component
        times = [at for at in self._times.get(key, []) if seconds is None or now - at < seconds]
        if len(times) >= self._limit.max:
            return None
        self._times[key] = [*times, now]
        return Restart(len(times) + 1, self._limit.max)
