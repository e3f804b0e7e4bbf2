"""Spans of the activities of this process, recorded while its run is traced.

    tracing.start()
    ...
    taken = tracing.take()

Without tracing, the only cost is the check whether there is a `recorder`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable
from typing import Final, NamedTuple

# The kinds of spans: a timer of the code, a method of a worker, a wait of a thread, and a transfer between two
# processes, waited for or not.
TIMER: Final = "timer"
METHOD: Final = "method"
WAIT: Final = "wait"
TRANSFER: Final = "transfer"

# The most spans kept between two collections, about 20 MB; further ones are only counted.
LIMIT: Final = 100_000


class TraceSpan(NamedTuple):
    """One timed activity.

    Attributes:
        kind: one of the kinds above.
        name: its label, for example `send to actor:0`.
        began: its beginning, in seconds since 1970 by the clock of its host.
        task_key: its thread or task; spans with the same task_key are nested or disjoint, except transfers.
    """

    kind: str
    name: str
    began: float
    seconds: float
    task_key: int


class Taken(NamedTuple):
    """The spans of one process since the last request, ordered by end, and the number of those dropped."""

    spans: list[TraceSpan]
    dropped: int


class SpanRecorder:
    """A recorder that keeps spans until they are taken. Any thread may add spans."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._spans: list[TraceSpan] = []
        self._dropped = 0
        # Operations are timed by the monotonic clock; only the time of day is comparable between hosts.
        self._epoch = time.time() - time.monotonic()

    def add(self, kind: str, name: str, began: float, ended: float, task_key: Hashable = None) -> None:
        """Record a finished span.

        Args:
            began, ended: the times by `time.monotonic` or `time.perf_counter`, which are the same clock on Linux.
            task_key: the ident of the thread, or the task, that it blocked; by default the calling one.
        """
        spans = self._spans
        if len(spans) >= self._limit:
            self._dropped += 1
            return
        owner = _own_strand() if task_key is None else task_key
        number = owner if isinstance(owner, int) else id(owner)
        spans.append(TraceSpan(kind, name, self._epoch + began, ended - began, number))

    def take(self) -> Taken:
        """Return the spans since the last call."""
        # A span that another thread is just adding to the old list may be lost.
        spans, self._spans = self._spans, []
        dropped, self._dropped = self._dropped, 0
        return Taken(spans, dropped)


# The recorder of this process; None while the run is not traced.
recorder: SpanRecorder | None = None


def start() -> None:
    """Record from now on. Idempotent."""
    global recorder
    if recorder is None:
        recorder = SpanRecorder()


def stop() -> None:
    """Stop recording and drop spans that were not collected."""
    global recorder
    recorder = None


def take() -> Taken:
    """Return the spans since the last call; none if tracing is off."""
    return recorder.take() if recorder is not None else Taken([], 0)


def _own_strand() -> Hashable:
    """Return the running task, else the thread."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()
