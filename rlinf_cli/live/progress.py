"""The state of a run, built from its events and a given clock. Views read it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from rlinf_core.runners import events

# The number of recent steps from which speed and time shares are computed.
_RECENT = 20
_TIME = "time/"
_WHOLE_STEP = "time/step"


class RunProgress:
    """The state of a run, updated by `take`.

    Attributes:
        lock: held by `take`, and by readers in other threads.
        started: the `RunStarted` event, or None before it.
        step: the last finished step; initially the step before the first.
        metrics: the newest value of every metric.
        phase: the current phase, by the names of `rlinf_core.runners.events`.
        done: the progress within the phase, as in `12 of 64 answers`; empty if unknown.
        waiting: the event that names what the launch waits for, or None.
        evaluation: the last evaluation, or None.
        checkpoint: the last checkpoint, or None.
        restart: the last restart, or None.
        restarts: the number of restarts, of which `runner.max_restarts` may count only the recent ones.
        finished: the `RunFinished` event, or None before it.
        curve: the image of the learning curve, once drawn.
        ending: whether the run was asked to end early.
        train_seconds: the seconds from `RunStarted` to the end or now; 0 before.

    Args:
        clock: a monotonic clock in seconds, shared with views that show times.
        times_only: whether to drop all metrics except times, as for a rehearsal, whose other metrics mean nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, times_only: bool = False) -> None:
        self.clock = clock
        self._times_only = times_only
        self.lock = threading.Lock()
        self._began = clock()
        self._ready: float | None = None
        self._phase_since = self._began
        self._waiting_since = self._began
        # End times of the last steps; the first is a start time.
        self._moments: deque[float] = deque(maxlen=_RECENT + 1)
        self._times: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self.started: events.RunStarted | None = None
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.phase = events.LAUNCH
        self.done = ""
        self.waiting: events.Waiting | None = None
        self.evaluation: events.Evaluated | None = None
        self.checkpoint: events.CheckpointSaved | None = None
        self.restart: events.RunRestarted | events.WorkersRelaunched | None = None
        self.restarts = 0
        self.finished: events.RunFinished | None = None
        self.curve: Path | None = None
        self.ending = False

    def take(self, event: events.Event) -> None:
        """Update the state with an event of the runner."""
        with self.lock:
            self._take(event, self.clock())

    def end(self) -> None:
        """Record that the run was asked to end early. Callable from a signal handler."""
        self.ending = True
        self._phase_since = self.clock()

    def _take(self, event: events.Event, now: float) -> None:
        match event:
            case events.RunStarted():
                self._start(event, now)
            case events.PhaseStarted():
                self._enter(event.phase, now)
            case events.PhaseProgress():
                self.done = event.text
            case events.Waiting():
                self._waiting_since = self._waiting_since if event.again else now
                self.waiting = event
            case events.StepFinished():
                self.step = event.step
                self._add(event.metrics)
                self._moments.append(now)
                self._times.append({k: v for k, v in event.metrics.items() if k.startswith(_TIME)})
            case events.Evaluated():
                self.evaluation, self.done = event, ""
                self._add(event.metrics)
            case events.CheckpointSaved():
                self.checkpoint = event
            case events.RunRestarted():
                self.restart, self.restarts, self.step = event, self.restarts + 1, event.step
                self._moments.clear()
                self._enter(events.LAUNCH, now)
            case events.WorkersRelaunched():
                self.restart, self.restarts, self.waiting = event, self.restarts + 1, None
            case events.RunFinished():
                self.finished = event
                self._add(event.metrics)
            case events.ClusterReady() | events.NodesChanged() | events.ItemsResumed():
                pass

    def _add(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update({k: v for k, v in metrics.items() if not self._times_only or k.startswith(_TIME)})

    def _start(self, event: events.RunStarted, now: float) -> None:
        self._ready = now
        self.started, self.step, self.waiting = event, event.first_step - 1, None
        self._moments.clear()
        self._moments.append(now)
        self._enter("", now)

    def _enter(self, phase: str, now: float) -> None:
        self.phase, self._phase_since = phase, now
        self.waiting, self.done = None, ""

    @property
    def total(self) -> int | None:
        """The number of the last step to train, or None if unknown."""
        return self.started.last_step if self.started else None

    @property
    def launch_seconds(self) -> float:
        """Seconds from the beginning to `RunStarted`, or to now if it has not come."""
        return (self.clock() if self._ready is None else self._ready) - self._began

    @property
    def train_seconds(self) -> float:
        """Seconds from `RunStarted` to the end of training, or to now."""
        if self.finished is not None:
            return self.finished.seconds
        return 0.0 if self._ready is None else self.clock() - self._ready

    @property
    def phase_seconds(self) -> float:
        """Seconds since the run entered `phase`."""
        return self.clock() - self._phase_since

    @property
    def waiting_seconds(self) -> float:
        """Seconds since the launch began to wait for `waiting`."""
        return self.clock() - self._waiting_since

    @property
    def steps_per_second(self) -> float | None:
        """Speed over the last steps, including evaluations and checkpoints; None before two steps have finished."""
        if len(self._moments) < 2:
            return None
        seconds = self._moments[-1] - self._moments[0]
        return (len(self._moments) - 1) / seconds if seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the current speed; None if unknown."""
        speed, total = self.steps_per_second, self.total
        return None if speed is None or total is None else max(0, total - self.step) / speed

    @property
    def seconds_of_step_left(self) -> float:
        """Seconds to the end of the current step at the current speed; 0 if unknown or overdue."""
        speed = self.steps_per_second
        return 0.0 if speed is None else max(0.0, 1 / speed - (self.clock() - self._moments[-1]))

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether there are steps after the last checkpoint and after the start."""
        if self.started is None:
            return False
        saved = self.checkpoint.step if self.checkpoint is not None else 0
        return self.step > max(saved, self.started.first_step - 1)

    def shares(self) -> tuple[float | None, list[tuple[str, float]]]:
        """Return how the time of the last steps was spent.

        Returns:
            The mean seconds of a step (None if unknown), and each phase with its share of the step, from 0 to 1,
            largest first. The shares of overlapping phases add up to more than 1.
        """
        sums = self._spent()
        phases = {name.removeprefix(_TIME): seconds for name, seconds in sums.items() if name.count("/") == 1}
        step_seconds = phases.pop(_WHOLE_STEP.removeprefix(_TIME), None) or sum(phases.values())
        if step_seconds <= 0:
            return None, []
        ordered = sorted(phases.items(), key=lambda item: -item[1])
        return step_seconds / len(self._times), [(name, seconds / step_seconds) for name, seconds in ordered]

    def shares_of_components(self) -> dict[str, list[tuple[str, float]]]:
        """Return the activities of each component in the last steps, as shares of a step's time.

        Components work in parallel, so their shares add up to more than 1.
        """
        step_seconds, _ = self.shares()
        shares: dict[str, list[tuple[str, float]]] = {}
        if step_seconds is None:
            return shares
        for name, seconds in self._spent().items():
            component, slash, work = name.removeprefix(_TIME).partition("/")
            if slash and "/" not in work:
                shares.setdefault(component, []).append((work, seconds / len(self._times) / step_seconds))
        return shares

    def _spent(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for times in self._times:
            for name, seconds in times.items():
                sums[name] = sums.get(name, 0.0) + seconds
        return sums
