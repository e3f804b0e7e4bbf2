"""Spans of what this process does, recorded while its run is traced.

    tracing.start()
    ...
    taken = tracing.take()

Where nothing is traced, looking whether there is a `recorder` is all it costs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable
from typing import Final, NamedTuple

# Kinds of spans: what the code timed itself, a method of a worker, what a thread was blocked in, and what was under way
# between two processes, waited for or not.
TIMER: Final = "timer"
METHOD: Final = "method"
WAIT: Final = "wait"
TRANSFER: Final = "transfer"

# Between two collections; what is beyond is counted only. About 20 MB.
LIMIT: Final = 100_000


class TraceSpan(NamedTuple):
    """Something that took time.

    Attributes:
        kind: one of the kinds above.
        name: its label, as in `send to actor:0`.
        began: the beginning in seconds since 1970 by the clock of its host.
        task_key: its thread or task; spans of one task_key are nested or disjoint, except transfers.
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
    """Keeps spans until they are taken. Any thread may add."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._spans: list[TraceSpan] = []
        self._dropped = 0
        # Operations are timed by the monotonic clock, hosts share the other one.
        self._epoch = time.time() - time.monotonic()

    def add(self, kind: str, name: str, began: float, ended: float, task_key: Hashable = None) -> None:
        """Record a finished span.

        Args:
            began, ended: the times by `time.monotonic` or `time.perf_counter`, which are one clock where we run.
            task_key: the thread, by its number, or the task that it held up; by default the one that calls.
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
        # A thread that has the old list in hand may lose the span that it adds now.
        spans, self._spans = self._spans, []
        dropped, self._dropped = self._dropped, 0
        return Taken(spans, dropped)


# The one of this process, or None while nothing is traced.
recorder: SpanRecorder | None = None


def start() -> None:
    """Record from now on; nothing changes where that is so already."""
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
