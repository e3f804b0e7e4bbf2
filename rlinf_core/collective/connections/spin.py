"""Spinning: polling for a moment before sleeping, since a wake-up costs more than the event."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

# A core that was yielded for longer was needed by another process, perhaps the one that we wait for.
_NEEDED_BY_OTHERS = 15e-6

T = TypeVar("T")


def spin(look: Callable[[], T], until: float) -> T | None:
    """Return the first true answer of `look` before `until`, on the monotonic clock; None when others need the core."""
    now = time.monotonic()
    while now < until:
        answer = look()
        if answer:
            return answer
        # The kernel likes to put both sides on one core: only looking would keep the other from answering.
        os.sched_yield()
        before, now = now, time.monotonic()
        if now - before > _NEEDED_BY_OTHERS:
            break
    return None
