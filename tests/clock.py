"""A clock that goes on only when told to."""

from __future__ import annotations


class Clock:
    """Stands for `time.monotonic` and `time.perf_counter`, or for the module `time` that has them.

    Attributes:
        now: seconds.
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    monotonic = perf_counter = __call__
