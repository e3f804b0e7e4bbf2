"""Looking for an event for a moment before sleeping: to be woken costs more than the event."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# A core that was given away for longer was needed by somebody, perhaps by whoever we wait for.
_NEEDED_BY_OTHERS = 15e-6

Events = list[tuple[int, int]]


def spin(poll: Callable[[float], Events], until: float) -> Events:
    """The first events that `poll(0)` finds before `until`, on the monotonic clock; none when others need the core."""
    now = time.monotonic()
    while now < until:
        events = poll(0)
        if events:
            return events
        # The kernel likes to put both sides on one core: only looking would keep the other from answering.
        os.sched_yield()
        before, now = now, time.monotonic()
        if now - before > _NEEDED_BY_OTHERS:
            break
    return []
