"""The state of a run as its events tell it. Pure: views read it, and whoever makes it passes the clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from rlinf_core.runners.events import (
    LAUNCH,
    CheckpointSaved,
    ClusterReady,
    CurveDrawn,
    Evaluated,
    Event,
    PhaseStarted,
    RunFinished,
    RunRestarted,
    RunStarted,
    StepFinished,
    Waiting,
)

# How many of the last steps speed and shares of time are taken over.
_RECENT = 20
_TIME = "time/"
_WHOLE_STEP = "time/step"


class RunProgress:
    """The state of a run; `take` brings it up to date.

    Attributes:
        lock: held by `take`, and by who reads from another thread.
        started: what the run said of itself when its workers were there, or None before.
        step: the last step that is over; before the first, the one before it.
        metrics: the newest value of every metric.
        phase: what the run is busy with, by the names of `rlinf_core.runners.events`.
        waiting: what it waits for while it launches, or None.
        evaluation: the last one, or None.
        checkpoint: the last one, or None.
        restart: the last one, or None.
        finished: how it ended, or None before.
        curve: the picture of the learning curve, once it is drawn.
        ending: whether it has been told to end before its time.
        train_seconds: from `RunStarted` to the end or now; 0 before.

    Args:
        clock: seconds on a monotonic clock; views that tell times share it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self._began = clock()
        self._ready: float | None = None
        self._phase_since = self._began
        self._waiting_since = self._began
        # Moments at which the last steps were over, the first of them a start.
        self._moments: deque[float] = deque(maxlen=_RECENT + 1)
        self._times: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self.started: RunStarted | None = None
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.phase = LAUNCH
        self.waiting: Waiting | None = None
        self.evaluation: Evaluated | None = None
        self.checkpoint: CheckpointSaved | None = None
        self.restart: RunRestarted | None = None
        self.finished: RunFinished | None = None
        self.curve: Path | None = None
        self.ending = False

    def take(self, event: Event) -> None:
        """Bring the state up to date with what a runner has told."""
        with self.lock:
            self._take(event, self.clock())

    def end(self) -> None:
        """Note that the run has been told to end before its time. Callable from a signal handler."""
        self.ending = True
        self._phase_since = self.clock()

    def _take(self, event: Event, now: float) -> None:
        match event:
            case RunStarted():
                self._start(event, now)
            case PhaseStarted():
                self._enter(event.phase, now)
            case Waiting():
                self.waiting, self._waiting_since = event, now
            case StepFinished():
                self.step = event.step
                self.metrics.update(event.metrics)
                self._moments.append(now)
                self._times.append({k: v for k, v in event.metrics.items() if k.startswith(_TIME)})
            case Evaluated():
                self.evaluation = event
                self.metrics.update(event.metrics)
            case CheckpointSaved():
                self.checkpoint = event
            case RunRestarted():
                self.restart, self.step = event, event.step
                self._moments.clear()
                self._enter(LAUNCH, now)
            case RunFinished():
                self.finished = event
                self.metrics.update(event.metrics)
            case CurveDrawn():
                self.curve = event.path
            case ClusterReady():
                pass

    def _start(self, event: RunStarted, now: float) -> None:
        self._ready = now
        self.started, self.step, self.waiting = event, event.first_step - 1, None
        self._moments.clear()
        self._moments.append(now)
        self._enter("", now)

    def _enter(self, phase: str, now: float) -> None:
        self.phase, self._phase_since = phase, now
        self.waiting = None

    @property
    def total(self) -> int | None:
        """The last step, where it is known."""
        return self.started.last_step if self.started else None

    @property
    def launch_seconds(self) -> float:
        """From the beginning to `RunStarted`, or to now while it is awaited."""
        return (self.clock() if self._ready is None else self._ready) - self._began

    @property
    def train_seconds(self) -> float:
        """Since `RunStarted`, until the end of the run's work."""
        if self.finished is not None:
            return self.finished.seconds
        return 0.0 if self._ready is None else self.clock() - self._ready

    @property
    def phase_seconds(self) -> float:
        """Seconds that the run has been busy with `phase`."""
        return self.clock() - self._phase_since

    @property
    def waiting_seconds(self) -> float:
        """Seconds that it has waited for `waiting`."""
        return self.clock() - self._waiting_since

    @property
    def steps_per_second(self) -> float | None:
        """Over the last steps, evaluations and checkpoints between them included; None before two are over."""
        if len(self._moments) < 2:
            return None
        seconds = self._moments[-1] - self._moments[0]
        return (len(self._moments) - 1) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Until the last step at the present speed; None where that cannot be told."""
        speed, total = self.steps_per_second, self.total
        return None if speed is None or total is None else max(0, total - self.step) / speed

    @property
    def seconds_of_step_left(self) -> float:
        """Until the end of the step under way at the present speed; 0 where that cannot be told, or it is overdue."""
        speed = self.steps_per_second
        return 0.0 if speed is None else max(0.0, 1 / speed - (self.clock() - self._moments[-1]))

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether training has come further than the last checkpoint, and than where it began."""
        if self.started is None:
            return False
        saved = self.checkpoint.step if self.checkpoint is not None else 0
        return self.step > max(saved, self.started.first_step - 1)

    def shares(self) -> tuple[float | None, list[tuple[str, float]]]:
        """Return where the time of the last steps went.

        Returns:
            The mean seconds of a step, None where nobody has told, and the phases with their shares of it, from 0 to 1,
            the greatest first. Phases that overlap add up to more than 1.
        """
        sums = self._spent()
        phases = {name.removeprefix(_TIME): seconds for name, seconds in sums.items() if name.count("/") == 1}
        whole = phases.pop(_WHOLE_STEP.removeprefix(_TIME), None) or sum(phases.values())
        if whole <= 0:
            return None, []
        ordered = sorted(phases.items(), key=lambda item: -item[1])
        return whole / len(self._times), [(name, seconds / whole) for name, seconds in ordered]

    def shares_of_components(self) -> dict[str, list[tuple[str, float]]]:
        """Return what the processes of each component did in the last steps: the shares of a step's time, by component.

        Components work at the same time, so the shares of all of them add up to more than 1.
        """
        whole, _ = self.shares()
        found: dict[str, list[tuple[str, float]]] = {}
        if whole is None:
            return found
        for name, seconds in self._spent().items():
            component, slash, work = name.removeprefix(_TIME).partition("/")
            if slash and "/" not in work:
                found.setdefault(component, []).append((work, seconds / len(self._times) / whole))
        return found

    def _spent(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for times in self._times:
            for name, seconds in times.items():
                sums[name] = sums.get(name, 0.0) + seconds
        return sums
