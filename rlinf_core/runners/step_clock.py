"""The durations of steps, and the watch that detects and ends a standstill."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, Literal, Self, TypeAlias

from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.errors import RLinfError
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Restarts
from rlinf_core.supervision.client import current_client
from rlinf_core.supervision.job_view import JobSource, Standing, held_up
from rlinf_core.waiting import spell_seconds
from rlinf_core.worker.worker_group import WorkerGroup, end_worker

# A step that takes `SLOW` times the usual duration, the median of the last `STEPS` steps, may never end.
SLOW: Final = 5.0
STEPS: Final = 20
# Seconds without a step after which processes that certainly cannot continue are named, and after which others are.
FIRST_LOOK: Final = 2.0
SURE_AFTER: Final = 5.0
# A part of the warnings about a run that finishes no steps.
NO_STEP: Final = "no step has finished"
# The start of the cause of a death that ends a standstill.
GIVEN_UP: Final = "`runner.on_hang:"


class StepClock:
    """The time since the last step of a run, or since an evaluation began, compared with the usual duration.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._evaluations: deque[float] = deque(maxlen=STEPS)
        self._evaluates = False

    def finished(self) -> None:
        """Record that a step has finished, with all work after it except evaluations."""
        now = self._clock()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    @contextmanager
    def evaluation(self) -> Generator[None, None, None]:
        """Time an evaluation separately: it may take much longer than a step, and is not part of one."""
        before, began = self._last, self._clock()
        self._last, self._evaluates = began, True
        try:
            yield
            self._evaluations.append(self._clock() - began)
        finally:
            self._evaluates = False
            self._last = None if before is None else before + self._clock() - began

    def start_again(self) -> None:
        """Record that the step begins again, so that the time before does not count."""
        self._last = self._clock()

    @property
    def usual(self) -> float | None:
        """The usual seconds of a step, or of an evaluation while one runs; None while unknown."""
        durations = self._evaluations if self._evaluates else self._steps
        return median(durations) if durations else None

    @property
    def of_what(self) -> str:
        """The word for the steps or evaluations whose duration is `usual`, as it follows `the last`."""
        return "evaluations" if self._evaluates else "ones"

    @property
    def last(self) -> float | None:
        """The time when the last step finished, or the running evaluation began; None before."""
        return self._last

    def quiet(self) -> float:
        """Return the seconds since `last`, or 0 while that is less than `SLOW` times the usual duration."""
        usual = self.usual
        if self._last is None or usual is None:
            return 0.0
        quiet = self._clock() - self._last
        return quiet if quiet >= SLOW * usual else 0.0


class Stopwatch:
    """A start time and the time since, which does not depend on changes of the machine's clock."""

    def __init__(self) -> None:
        self._began, self._ticks = time.time(), time.monotonic()

    def times(self) -> dict[str, float]:
        """Return `began`, in seconds since 1970, and `seconds`, the time since then."""
        return {"began": self._began, "seconds": time.monotonic() - self._ticks}


LOGGER = logging.getLogger("rlinf")
# Seconds without a step after which the process that holds up the run is ended.
_END_AFTER: Final = 10.0
# Seconds between two checks, or 5 % of the time since the last step if that is longer.
_LOOK_EVERY: Final = 1.0
_SHARE: Final = 0.05

OnHang: TypeAlias = Literal["restart", "fail", "wait"]


class HangWatch:
    """A thread of the driver that finds the processes that hold up a run whose step takes much longer than usual.

    It logs a worker that cannot continue, such as a zombie, after 2 s without a step, and any other worker after 5 s if
    nothing moves. It logs again whenever the time has doubled, and ends a worker after at least 10 s.

    Args:
        on_hang: the reaction: `restart` ends the worker, so that the run restarts; `fail` ends it and the run; `wait`
            only logs it.
        groups: the worker groups by component.
        record: the record of the run.
        clock: the clock of its steps.
    """

    def __init__(
        self,
        on_hang: OnHang,
        groups: Mapping[str, WorkerGroup[Any]],
        record: RunRecord,
        clock: StepClock,
    ) -> None:
        self._on_hang = on_hang
        self._groups = {group.worker_group_name: group for group in groups.values()}
        self._record = record
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlinf-hang-watch", daemon=True)
        # `StepClock.last` at the last warning, and the seconds without a step after which the warning is repeated.
        self._named: tuple[float | None, float] = (None, 0.0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A running check ends by itself, without effect.
        self._ended.set()

    def _run(self) -> None:
        quiet = 0.0
        while not self._ended.wait(max(_LOOK_EVERY, _SHARE * quiet)):
            client, quiet = current_client(), self._clock.quiet()
            if client is not None and quiet >= FIRST_LOOK:
                try:
                    self.look(client, quiet)
                except (RLinfError, OSError):
                    continue  # the manager or a process has ended, which is reported elsewhere

    def look(self, job: JobSource, quiet: float) -> None:
        """Log the processes that hold up the run `quiet` seconds after its last step, and end the first if due."""
        last = self._clock.last
        standing = held_up(job, certain_only=quiet < SURE_AFTER)
        if not standing or any(one.is_debugged for one in standing) or self._clock.last != last or self._ended.is_set():
            return
        quiet = self._clock.quiet()
        who = "; ".join(one.how for one in standing)
        usual = f"the last {self._clock.of_what} took {self._clock.usual:.2g} s each"
        words = f"{who}; {NO_STEP} for {spell_seconds(quiet)}, {usual}"
        before, again = self._named
        if before != last or quiet >= again:
            self._named = (last, 2 * quiet)
            LOGGER.warning("%s", words)
        if self._on_hang != "wait" and quiet >= _END_AFTER:
            self._end(standing[0], words)

    def _end(self, standing: Standing, words: str) -> None:
        name, _, rank = standing.name.rpartition(":")
        if name not in self._groups:
            return
        if self._on_hang == "fail":
            self._record.restarts = Restarts(RestartLimit(max=0))
        LOGGER.warning("`%s` is ended, for %s %s`", standing.name, GIVEN_UP, self._on_hang)
        end_worker(self._groups[name], int(rank), f"{GIVEN_UP} {self._on_hang}` ended it: {words}")
        self._clock.start_again()
