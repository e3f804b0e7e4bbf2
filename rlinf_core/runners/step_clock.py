"""The time that steps take, and how long one is waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median
from typing import Final

# A step that takes so many times the usual one may never end; the usual one is the median of so many.
SLOW: Final = 5.0
STEPS: Final = 20
# Seconds without a step after which processes that cannot go on are named, and after which others are.
FIRST_LOOK: Final = 2.0
SURE_AFTER: Final = 5.0
# Words of the warnings about a run that finishes no steps.
NO_STEP: Final = "no step has finished"
# The first words of the cause of a death that ends a standstill.
GIVEN_UP: Final = "`runner.on_hang:"


class StepClock:
    """The time since the last step of a run, or since an evaluation began, against what these take.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._evaluations: deque[float] = deque(maxlen=STEPS)
        self._evaluates = False

    def finished(self) -> None:
        """Note that a step has finished, with all that follows it but evaluations."""
        now = self._clock()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    @contextmanager
    def evaluation(self) -> Generator[None, None, None]:
        """Time an evaluation by itself: it may take much longer than a step, and is no part of one."""
        before, began = self._last, self._clock()
        self._last, self._evaluates = began, True
        try:
            yield
            self._evaluations.append(self._clock() - began)
        finally:
            self._evaluates = False
            self._last = None if before is None else before + self._clock() - began

    def start_again(self) -> None:
        """Note that the step begins again: its duration says nothing of others."""
        self._last = self._clock()

    @property
    def usual(self) -> float | None:
        """The seconds that a step takes, or an evaluation while one runs; None while that is not known."""
        durations = self._evaluations if self._evaluates else self._steps
        return median(durations) if durations else None

    @property
    def of_what(self) -> str:
        """The word for those whose duration `usual` is."""
        return "evaluations" if self._evaluates else "ones"

    @property
    def last(self) -> float | None:
        """When the last step finished, or the evaluation began."""
        return self._last

    def quiet(self) -> float:
        """Return the seconds since `last`, or 0 while these are no more than it may take."""
        usual = self.usual
        if self._last is None or usual is None:
            return 0.0
        quiet = self._clock() - self._last
        return quiet if quiet >= SLOW * usual else 0.0


class Stopwatch:
    """The begin of something and the time since, however the machine's clock is set meanwhile."""

    def __init__(self) -> None:
        self._began, self._ticks = time.time(), time.monotonic()

    def times(self) -> dict[str, float]:
        """Return `began`, in seconds since 1970, and `seconds`, the time since."""
        return {"began": self._began, "seconds": time.monotonic() - self._ticks}
