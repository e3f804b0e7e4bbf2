"""The interface that a recipe implements for placement advice: durations of calls, and the virtual time that simulates
its work.

A duration is a function of a call's rows, fitted to the records of runs. Simulated processes are generators that use
devices, sleep, and wait for messages:

    clock = VirtualTime()

    def worker():
        yield Receive("orders")
        yield Use(device, 0.3)
        clock.put("done")

    clock.start(worker())
    clock.run()
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from rlinf_core.job.arrangements import Arrangement, Flow

# Sizes that differ by a smaller factor determine no slope.
_APART: Final = 1.5
# Calls are steady if the mean of their durations is below this multiple of the median.
_STEADY: Final = 1.05
# The relative error of the model itself, from real runs of the jobs that it was made from.
FLOW_ERROR: Final = 0.04


class CallRow(NamedTuple):
    """Recorded calls of one phase.

    Attributes:
        component, phase: the component's name and the phase's, as in `rollout` and `rollout/policy`.
        rows: the rows of a call, such as environments or tokens; 0 if the phase has none.
        model: the accelerator's model; empty without an accelerator.
        calls: the number of calls.
        seconds: the median duration of a call.
        spread: equidistant quantiles of the durations, relative to the median; empty for steady calls.
        shared: whether another busy component used the accelerator meanwhile, so that durations include waits.
    """

    component: str
    phase: str
    rows: float
    model: str
    calls: int
    seconds: float
    spread: tuple[float, ...] = ()
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Duration:
    """The seconds of a call as `fix + slope x rows`, with `fix` and `slope` at least 0.

    Attributes:
        rows: the smallest and the largest recorded number of rows.
        error: the mean difference between a measured median and the line, relative to the median.
        one_size: whether only one size was recorded, which fits many lines; `between` gives the extremes.
        spread: see `CallRow`.
    """

    fix: float
    slope: float = 0.0
    rows: tuple[float, float] = (0.0, math.inf)
    error: float = 0.0
    one_size: bool = False
    spread: tuple[float, ...] = ()

    def at(self, rows: float) -> float:
        """Return the median seconds of a call with `rows` rows."""
        return self.fix + self.slope * rows

    def mean(self, rows: float) -> float:
        """Return the mean seconds of a call with `rows` rows."""
        return self.at(rows) * (fmean(self.spread) if self.spread else 1.0)

    def between(self) -> tuple[Duration, Duration]:
        """Return the extremes that fit the record: a duration proportional to the rows, and a constant one."""
        if not self.one_size:
            return self, self
        seconds, rows = self.at(self.rows[0]), max(self.rows[0], 1e-9)
        return replace(self, fix=0.0, slope=seconds / rows), replace(self, fix=seconds, slope=0.0)

    def faster(self, factor: float) -> Duration:
        """Return the duration on a device that is `factor` times as fast."""
        return replace(self, fix=self.fix / factor, slope=self.slope / factor)

    def extrapolates(self, rows: float) -> bool:
        """Return whether `rows` is outside the recorded range."""
        return not self.rows[0] * 0.99 <= rows <= self.rows[1] * 1.01


def fit_duration(rows: Sequence[CallRow]) -> Duration:
    """Return the line through the medians of one phase on one accelerator model, by least squares over all calls.

    Rows from a shared accelerator are used only if there are no others.

    Raises:
        ValueError: `rows` is empty.
    """
    if not rows:
        raise ValueError("a duration needs at least one recorded row")
    alone = [row for row in rows if not row.shared]
    points = alone or list(rows)
    spread = max((row for row in points), key=lambda row: row.calls).spread
    sizes = [row.rows for row in points]
    least, most = min(sizes), max(sizes)
    weights = [row.calls for row in points]
    x, y = fmean(sizes, weights), fmean((row.seconds for row in points), weights)
    if most < _APART * least or least == most:
        seconds = y
        slope = seconds / x if most else 0.0
        return Duration(0.0 if most else seconds, slope, (least, most), one_size=most > 0, spread=spread)
    across = sum(row.calls * (row.rows - x) * (row.seconds - y) for row in points)
    slope = max(0.0, across / sum(row.calls * (row.rows - x) ** 2 for row in points))
    fix = max(0.0, y - slope * x)
    if fix == 0.0:
        slope = sum(row.calls * row.rows * row.seconds for row in points) / sum(
            row.calls * row.rows * row.rows for row in points
        )
    off = (abs(fix + slope * row.rows - row.seconds) / max(row.seconds, 1e-9) for row in points)
    error = fmean(off, weights)
    return Duration(fix, slope, (least, most), error, spread=spread)


def fit_by_model(rows: Iterable[CallRow]) -> dict[str, Duration]:
    """Return the duration of one phase on each accelerator model in the record.

    A model with one recorded size gets the line of a model with several, scaled to agree at that size.
    """
    by_model: dict[str, list[CallRow]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    fits = {model: fit_duration(seen) for model, seen in by_model.items()}
    known = next((fit for fit in fits.values() if not fit.one_size and fit.rows[1]), None)
    if known is not None:
        for model, fit in fits.items():
            if fit.one_size:
                at = fit.rows[0]
                shaped = known.faster(known.at(at) / max(fit.at(at), 1e-12))
                fits[model] = replace(shaped, rows=fit.rows, spread=fit.spread)
    return fits


def steady_or_spread(quantiles: Sequence[float]) -> tuple[float, ...]:
    """Return quantiles of durations relative to their median; empty if the mean is close to the median."""
    middle = sorted(quantiles)[len(quantiles) // 2] if quantiles else 0.0
    if middle <= 0 or fmean(quantiles) < _STEADY * middle:
        return ()
    return tuple(value / middle for value in quantiles)


class Durations(NamedTuple):
    """The durations of a job's phases, by phase, then by accelerator model."""

    phases: Mapping[str, Mapping[str, Duration]]

    @classmethod
    def of(cls, rows: Iterable[CallRow]) -> Durations:
        """Return the fits of all phases."""
        by_phase: dict[str, list[CallRow]] = {}
        for row in rows:
            by_phase.setdefault(row.phase, []).append(row)
        return cls({phase: fit_by_model(seen) for phase, seen in by_phase.items()})

    def of_phase(self, phase: str, model: str) -> Duration | None:
        """Return the duration of a phase on an accelerator model; None if it was not recorded there."""
        return self.phases.get(phase, {}).get(model)

    def extremes(self) -> tuple[Durations, Durations]:
        """Return the durations with every one-size phase proportional to its rows, and with each constant."""
        pairs = {
            phase: {model: duration.between() for model, duration in models.items()}
            for phase, models in self.phases.items()
        }
        low, high = (
            Durations({phase: {model: pair[side] for model, pair in models.items()} for phase, models in pairs.items()})
            for side in (0, 1)
        )
        return low, high

    def one_sized(self) -> list[str]:
        """Return the phases, with their accelerator models, for which only one size was recorded."""
        return [
            phase if not model else f"{phase} on {model}"
            for phase, models in self.phases.items()
            for model, duration in models.items()
            if duration.one_size
        ]

    @property
    def error(self) -> float:
        """The expected relative error of a step: the model's error plus the error of the worst fit."""
        fits = [duration.error for models in self.phases.values() for duration in models.values()]
        return FLOW_ERROR + max(fits, default=0.0)


# The values of a trial: a few steps, the first of which warms up, without checkpoints or evaluation.
TRIAL: Mapping[str, Any] = MappingProxyType(
    {
        "runner.max_steps": 4,
        "runner.max_epochs": -1,
        "runner.max_staleness": 0,
        "runner.max_restarts": 0,
        "runner.val_check_interval": -1,
        "runner.save_interval": -1,
        "runner.save_on_interrupt": False,
        "runner.skip_checks": True,
        "runner.resume_dir": None,
        "runner.only_eval": False,
        "runner.logger.logger_backends": [],
        "runner.profiler": None,
        "runner.metrics_port": None,
        "actor.checkpoint_save_path": None,
    }
)


def halves(most: int, unit: int = 1) -> list[int]:
    """Return `most`, its half and its quarter, as multiples of `unit` from 1 on; ascending, without repeats."""
    sizes = [most // part // unit * unit for part in (4, 2, 1)]
    return sorted({max(unit, size) for size in sizes})


Sizes: TypeAlias = Mapping[str, Sequence[tuple[float, int]]]
"""The sizes of items, such as tokens of answers, by phase: pairs of a size and the number of items about that size."""


class Recorded(Protocol):
    """The record of a run.

    Attributes:
        arrangement: the placement of its components.
        models: the accelerator model of each group.
        rows: its calls.
        phases: the median seconds of the phases of its steps, by metric, as in `time/step`.
        sizes: the sizes of its items.
    """

    @property
    def arrangement(self) -> Arrangement: ...
    @property
    def models(self) -> Mapping[str, str]: ...
    @property
    def rows(self) -> Sequence[CallRow]: ...
    @property
    def phases(self) -> Mapping[str, float]: ...
    @property
    def sizes(self) -> Sizes: ...


class JobFlow(Protocol):
    """The flow of one job, before its durations are known.

    Attributes:
        components: the placed components, in the order in which a step needs them, the trainer last.
        phases: the phases that the record must have, by component.
        stages: the numbers of pipeline stages to try.
        stages_now: the number of pipeline stages in the file.
    """

    @property
    def components(self) -> tuple[str, ...]: ...
    @property
    def phases(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def stages(self) -> tuple[int, ...]: ...

    @property
    def stages_now(self) -> int: ...

    def legal(self, arrangement: Arrangement) -> bool:
        """Return whether the recipe accepts an arrangement by its numbers of processes, stages and rows."""
        ...

    def flow(self, durations: Durations, models: Mapping[str, str], sizes: Sizes) -> Flow:
        """Return the flow with durations; `models` and `sizes` are as in `Recorded`."""
        ...

    def calls(self, run: Recorded) -> Sequence[CallRow]:
        """Return the calls of a run, with rows counted as in `rows`."""
        ...

    def constants(self, run: Recorded, durations: Durations) -> list[CallRow]:
        """Return durations that only a whole run shows, such as the seconds of a message, as calls of the driver."""
        ...

    def rows(self, arrangement: Arrangement) -> Mapping[str, float]:
        """Return the rows that a call of each phase has in an arrangement."""
        ...

    def changes(self, arrangement: Arrangement) -> Mapping[str, Any]:
        """Return the values that an arrangement needs in the file besides the placement, by key."""
        ...

    def trial_sizes(self, now: Arrangement) -> Sequence[int]:
        """Return up to three trial sizes close to the size of a process's calls in the arrangement `now`.

        A trial is a job of a few steps with one process per component. Its size is the number of items with which a
        step begins, such as environments.
        """
        ...

    def trial_size(self, component: str, rows: int, now: Arrangement) -> int:
        """Return the size of a trial in which a call of `component` has `rows` rows; 0 if there is none."""
        ...

    def trial(self, size: int, now: Arrangement) -> Mapping[str, Any]:
        """Return the values that a trial needs in the file besides the placement, by key."""
        ...

    def rehearsal(self) -> Sequence[str]:
        """Return the overrides that replace the job's work by stand-ins that do nothing.

        Raises:
            RLinfError: the job cannot be rehearsed.
        """
        ...


class Use(NamedTuple):
    """Work on a device for some seconds, after all earlier requests for it; a sleep if the device is None."""

    device: Hashable
    seconds: float


class Receive(NamedTuple):
    """A wait for `number` messages in a box, which it removes."""

    box: Hashable
    number: int = 1


Process: TypeAlias = Generator[Use | Receive, None, None]


class VirtualTime:
    """A clock that jumps from event to event.

    Attributes:
        now: the seconds since the start.
        busy: the seconds that each device has worked.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.busy: defaultdict[Hashable, float] = defaultdict(float)
        self._events: list[tuple[float, int, Any, Any, int]] = []
        self._serial = 0
        self._queues: dict[Hashable, deque[tuple[float, Process]]] = {}
        self._boxes: defaultdict[Hashable, int] = defaultdict(int)
        self._waiting: defaultdict[Hashable, deque[tuple[int, Process]]] = defaultdict(deque)

    def start(self, process: Process) -> None:
        """Start a process at the present time."""
        self._at(self.now, process, None, 0)

    def put(self, box: Hashable, delay: float = 0.0, count: int = 1) -> None:
        """Put messages into a box, after a delay in seconds."""
        if delay > 0:
            self._at(self.now + delay, None, box, count)
        else:
            self._deliver(box, count)

    def stop(self) -> None:
        """Discard all pending events, so that `run` returns."""
        self._events.clear()

    def run(self) -> None:
        """Run until no event is pending."""
        while self._events:
            self.now, _, process, place, count = heapq.heappop(self._events)
            if process is None:
                self._deliver(place, count)
                continue
            if place is not None:
                self._release(place)
            self._advance(process)

    def _at(self, moment: float, process: Process | None, place: Hashable, count: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (moment, self._serial, process, place, count))

    def _advance(self, process: Process) -> None:
        for wish in process:
            if isinstance(wish, Receive):
                if self._boxes[wish.box] >= wish.number and not self._waiting[wish.box]:
                    self._boxes[wish.box] -= wish.number
                    continue
                self._waiting[wish.box].append((wish.number, process))
            elif wish.device is None:
                self._at(self.now + wish.seconds, process, None, 0)
            elif wish.device in self._queues:
                self._queues[wish.device].append((wish.seconds, process))
            else:
                self._queues[wish.device] = deque()
                self._occupy(wish.device, wish.seconds, process)
            return

    def _occupy(self, device: Hashable, seconds: float, process: Process) -> None:
        self.busy[device] += seconds
        self._at(self.now + seconds, process, device, 0)

    def _release(self, device: Hashable) -> None:
        queue = self._queues[device]
        if queue:
            self._occupy(device, *queue.popleft())
        else:
            del self._queues[device]

    def _deliver(self, box: Hashable, count: int) -> None:
        self._boxes[box] += count
        waiting = self._waiting[box]
        while waiting and self._boxes[box] >= waiting[0][0]:
            wanted, process = waiting.popleft()
            self._boxes[box] -= wanted
            self._advance(process)
