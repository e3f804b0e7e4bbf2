"""The schedule of a run's snapshots: checkpoints by time, each of which the next one replaces.

It bounds what the death of an actor costs, and what saving costs: at most 1 % of the time, however long one takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

# After one that took a second no other is saved for so many seconds.
_REST: Final = 100.0


class SnapshotSchedule:
    """The moments of a run's snapshots.

    Args:
        seconds: the seconds between two snapshots at least; None: there are none.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._next = clock() + (seconds or 0.0)

    @property
    def due(self) -> bool:
        """Whether the state should be saved after this step."""
        return self._seconds is not None and self._clock() >= self._next

    @contextmanager
    def saving(self) -> Generator[None, None, None]:
        """Measure how long it takes to save the state in the block, and set the moment of the next snapshot."""
        began = self._clock()
        yield
        ended = self._clock()
        self._next = ended + max(self._seconds or 0.0, _REST * (ended - began))

    def stop(self) -> None:
        """Save no further snapshot."""
        self._seconds = None
