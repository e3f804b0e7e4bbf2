"""Restarts after deaths: their limit, in all or of each component within a time, and the death that is the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError

_ALL: Final = ""


class NodesReturned(Exception):  # noqa: N818 - no failure: the run goes on with them
    """Nodes that elastic components do without have joined again; the state of the run is saved."""


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


def death(error: WorkerGroupError | WorkerDiedError) -> WorkerDiedError | None:
    """Return the death that is the root cause of a failure, or None."""
    first: BaseException = error.__cause__ if isinstance(error.__cause__, WorkerGroupError) else error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, WorkerDiedError) else None


def all_deaths(error: BaseException | None) -> dict[str, WorkerDiedError]:
    """Return the deaths that a failure and its cause report, by the address of the dead."""
    if error is None:
        return {}
    deaths = all_deaths(error.__cause__)
    if isinstance(error, WorkerDiedError):
        deaths.setdefault(error.address, error)
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            deaths = {**all_deaths(inner), **deaths}
    return deaths
