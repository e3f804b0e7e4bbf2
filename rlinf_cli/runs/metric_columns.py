"""A run's metrics by name, as columns and bands for charts; waits and long answers derived from the metrics."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice, pairwise, takewhile
from typing import Final, NamedTuple, TypeAlias

from rlinf_core.runners.metrics import EVALUATION_TIME, CallsOfSize, Metrics, wilson_interval

# The most points of a curve; more points than pixels would add nothing.
MOST_POINTS: Final = 300
# The number of newest values of a metric that describe the current state.
NEWEST: Final = 100
# The number of lines that are in memory at a time.
_PART: Final = 2000
# A greater value, as of a loss that diverged, counts as infinite: sums of squares would overflow.
_MOST_VALUE: Final = 1e150
Steps: TypeAlias = "MutableSequence[int]"
Values: TypeAlias = "MutableSequence[float]"


class Band(NamedTuple):
    """The values of a metric in a stretch of steps.

    Attributes:
        step: the median of the steps that have a value.
        mean: the mean of the values.
        low, high: the least and the greatest value; for an evaluation, its 95 % interval or None.
    """

    step: float
    mean: float
    low: float | None
    high: float | None


@dataclass(slots=True)
class MetricColumn:
    """The values of one metric with their steps, in order; NaN for a value that was not finite."""

    steps: Steps = field(default_factory=lambda: array("q"))
    values: Values = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def last(self, count: int) -> MetricColumn:
        """Return the last `count` values."""
        return MetricColumn(self.steps[-count:], self.values[-count:])

    def where(self, wanted: Callable[[int, float], bool]) -> MetricColumn:
        """Return the steps for which `wanted(step, value)` is true."""
        kept = [pair for pair in zip(self.steps, self.values, strict=True) if wanted(*pair)]
        return MetricColumn(array("q", [step for step, _ in kept]), array("d", [value for _, value in kept]))

    def finite(self) -> MetricColumn:
        """Return the steps with a finite value; one whose square is not finite is none, either."""
        if all(abs(value) < _MOST_VALUE for value in self.values):
            return self
        return self.where(lambda _, value: abs(value) < _MOST_VALUE)

    def since(self, lowest: float, highest: float) -> int | None:
        """Return the step since which all values lie within the bounds; None if the last value does not."""
        inside = sum(1 for _ in takewhile(lambda value: lowest <= value <= highest, reversed(self.values)))
        return self.steps[-inside] if inside else None

    def mean(self) -> float:
        """Return the mean of the values; 0 without values."""
        return math.fsum(self.values) / len(self.values) if self.values else 0.0

    def bands(self, most: int = MOST_POINTS) -> list[Band]:
        """Return at most `most` bands with about equally many values; a short column has one band per value."""
        count = len(self.steps)
        bounds = range(count + 1) if count <= most else [count * number // most for number in range(most + 1)]
        bands: list[Band] = []
        for start, end in pairwise(bounds):
            part = self.values[start:end]
            step = self.steps[(start + end - 1) // 2]
            bands.append(Band(step, math.fsum(part) / (end - start), min(part), max(part)))
        return bands


@dataclass
class RunSeries:
    """All metrics of a run.

    Attributes:
        columns: the columns by the metrics' names.
        evaluations: (step, metrics) of each step that was evaluated.
        steps: the steps with metrics.
        times: the time at which each step's metrics were written, in seconds since 1970.
    """

    columns: dict[str, MetricColumn] = field(default_factory=dict[str, MetricColumn])
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list[tuple[int, Mapping[str, float]]])
    steps: Steps = field(default_factory=lambda: array("q"))
    times: Values = field(default_factory=lambda: array("d"))

    @property
    def pace(self) -> float | None:
        """Steps a second, without the time between the end of a run and its resumption; None if unknown."""
        column = self.finite.get(_STEP, MetricColumn())
        seconds = math.fsum(column.values) + math.fsum(self.finite.get(EVALUATION_TIME, MetricColumn()).values)
        return len(column) / seconds if len(column) and seconds > 0 else None

    @cached_property
    def finite(self) -> dict[str, MetricColumn]:
        """The columns with their finite values only; a metric without finite values is left out."""
        columns = {name: column.finite() for name, column in self.columns.items()}
        return {name: column for name, column in columns.items() if len(column)}


def series_of(lines: Iterable[Metrics]) -> RunSeries:
    """Return the metrics of a run by name; read the lines once."""
    series, rest = RunSeries(), iter(lines)
    while part := list(islice(rest, _PART)):
        # Convert lines with the same metrics together, which is several times as fast.
        for names, group in groupby(part, key=lambda line: tuple(line.metrics)):
            alike = list(group)
            steps = [line.step for line in alike]
            for name, values in zip(names, zip(*(line.metrics.values() for line in alike), strict=True), strict=True):
                column = series.columns.setdefault(name, MetricColumn())
                column.steps.extend(steps)
                column.values.extend(values)
            if any(name.startswith("eval/") for name in names):
                series.evaluations += [(line.step, line.metrics) for line in alike]
            series.steps.extend(steps)
            series.times.extend(line.time for line in alike)
    return series


def evaluated(metric: str, evaluations: Iterable[tuple[int, Mapping[str, float]]]) -> list[Band]:
    """Return every evaluation's value of `metric`, with its 95 % interval if known."""
    points: list[Band] = []
    for step, metrics in evaluations:
        value = metrics.get(metric, math.nan)
        if math.isfinite(value):
            low, high, _ = interval_of(metric, metrics)
            points.append(Band(step, value, low, high))
    return points


def interval_of(metric: str, metrics: Mapping[str, float]) -> tuple[float | None, float | None, int | None]:
    """Return the 95 % interval of an evaluation metric, and the number of episodes averaged; None if unknown.

    Args:
        metric: the full name of a metric below `eval/` that has a value.
        metrics: all metrics of the same evaluation.
    """
    space, _, name = metric.rpartition("/")
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    low, high = finite.get(f"{metric}_low"), finite.get(f"{metric}_high")
    episodes = finite.get(f"{space}/episodes", finite.get(f"{space}/answers"))
    count = int(episodes) if episodes else None
    if low is None and name.startswith("success") and count and 0 <= metrics[metric] <= 1:
        low, high = wilson_interval(metrics[metric] * count, count)
    return low, high, count


def newest_of(columns: Mapping[str, MetricColumn]) -> dict[str, float]:
    """Return the last value of each metric."""
    return {name: column.values[-1] for name, column in columns.items()}


# Predictions of another placement err by about 4 % of a step, and at worst by 10 %, so a shorter wait is no sure gain.
MATTERS: Final = 0.1
# The number of answers that a percentile needs.
_FEWEST_ANSWERS: Final = 100
_STEP, _GENERATE, _ENGINE, _ANSWER = "time/step", "time/generate_rollouts", "engine/step", "answer"
_ENV, _ROLLOUT, _ACTOR = "env", "rollout", "actor"
_PARTNERS: Final = {_ENV: _ROLLOUT, _ROLLOUT: _ENV}

Units = Mapping[str, Collection[tuple[int, int | None]]]
"""The places of each component's processes: nodes, each with an accelerator or None."""


class ComponentWait(NamedTuple):
    """A component that waits for another.

    Attributes:
        who, whom: the waiting and the awaited component; `whom` may be something else, as in `scores and messages`.
        share: the part of a step that `who` waits.
        source: the measurement that shows the wait.
        in_turns: whether `whom` has all the hardware of `who`: then the two take turns, and no hardware is idle.
    """

    who: str
    whom: str
    share: float
    source: str
    in_turns: bool = False

    @property
    def matters(self) -> bool:
        """Whether hardware is idle for longer than the error of predictions."""
        return self.share >= MATTERS and not self.in_turns

    @property
    def words(self) -> str:
        """The wait in words: `actor waits for rollout for 61 % of a step`."""
        turns = ", in turns on the same hardware" if self.in_turns else ""
        return f"{self.who} waits for {self.whom} for {self.share:.0%} of a step{turns}".replace("%", " %")


class LengthTail(NamedTuple):
    """The lengths of answers in tokens, and the time that the longest answers take.

    Attributes:
        middle, percentile, longest: the median, the 99th percentile, and the greatest length.
        last, of: the number of answers among an engine's longest 1 %, at least one, and the number of its answers.
        generation: the part of the engines' time in which only these longest answers are left.
        step: the same time as a part of a step.
    """

    middle: float
    percentile: float
    longest: float
    last: int
    of: int
    generation: float
    step: float

    @property
    def matters(self) -> bool:
        """Whether generating other answers in this time would be a sure gain."""
        return self.step >= MATTERS

    @property
    def cost(self) -> str:
        """The time that the longest answers take, in words."""
        which = "1 %" if self.last > 1 else f"1 of {self.of}"
        shares = f"{self.generation:.0%} of generation, {self.step:.0%} of a step".replace("%", " %")
        return f"the longest {which} of answers take {shares}"

    @property
    def lengths(self) -> str:
        """The lengths in words."""
        return f"tokens of an answer: median {self.middle:.0f}, p99 {self.percentile:.0f}, longest {self.longest:.0f}"


def waits_of(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize], units: Units) -> list[ComponentWait]:
    """Return the waits between components in the newest steps, longest first.

    Args:
        columns: the metrics of the run.
        calls: the timed calls of its processes.
        units: the hardware of each component's processes; a missing component has hardware of its own.
    """
    waits = [
        wait._replace(in_turns=_in_turns(wait, units)) for wait in _every_wait(columns, calls) if wait.share >= 0.005
    ]
    return sorted(waits, key=lambda wait: (wait.in_turns, -wait.share))


def _in_turns(wait: ComponentWait, units: Units) -> bool:
    own, others = units.get(wait.who), units.get(wait.whom)
    if own is None:
        return False
    # A wait for something that is not a component leaves accelerators idle, but processors free for others.
    return all(unit is None for _, unit in own) if others is None else set(own) <= set(others)


def _every_wait(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize]) -> Iterator[ComponentWait]:
    step = _recent(columns, _STEP)
    if not step:
        return
    for who, whom in _PARTNERS.items():
        name = f"time/{who}/wait"
        if name in columns:
            yield ComponentWait(who, whom, _recent(columns, name) / step, name)
    if "speed/env_idle" in columns:
        for who in (_ENV, _ROLLOUT):
            yield ComponentWait(who, _ACTOR, _recent(columns, "speed/env_idle"), "speed/env_idle")
    if "speed/learner_idle" in columns:
        yield ComponentWait(_ACTOR, _ROLLOUT, _recent(columns, "speed/learner_idle"), "speed/learner_idle")
        return
    if _GENERATE not in columns:
        return
    generate = _recent(columns, _GENERATE) / step
    yield ComponentWait(_ACTOR, _ROLLOUT, generate, _GENERATE)
    if "rollout/in_flight" in columns:
        return
    yield ComponentWait(_ROLLOUT, _ACTOR, 1 - generate, _GENERATE)
    steps = [row for row in calls if row.phase == _ENGINE]
    seconds = sum(map(sum, (columns[name].values for name in (_STEP, EVALUATION_TIME) if name in columns)))
    if steps and seconds:
        busy = sum(row.seconds for row in steps) / max(row.processes for row in steps) / seconds
        whom = "tools, scores and messages" if "agent/turns" in columns else "scores and messages"
        yield ComponentWait(_ROLLOUT, whom, max(0.0, generate - busy), f"{_ENGINE} of profile.json")


def tail_of(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize]) -> LengthTail | None:
    """Return the tail of a run's answer lengths; None if the run has too few answers."""
    answers = sorted((row.rows, row.calls) for row in calls if row.phase == _ANSWER)
    number = sum(calls for _, calls in answers)
    steps = [row for row in calls if row.phase == _ENGINE and row.rows]
    step = _recent(columns, _STEP)
    if number < _FEWEST_ANSWERS or not steps or not step:
        return None
    # Every step begins with all of its answers. Ignore rare sizes: an evaluation may have more answers.
    often = [row.rows for row in steps if row.calls * 2 >= len(columns[_STEP])]
    of = round(max(often or [row.rows for row in steps]))
    last = max(1, of // 100)
    whole = sum(row.seconds for row in steps)
    share = sum(row.seconds for row in steps if row.rows <= last) / whole if whole else 0.0
    middle, percentile = (_percentile(answers, part * number) for part in (0.5, 0.99))
    return LengthTail(middle, percentile, answers[-1][0], last, of, share, share * _recent(columns, _GENERATE) / step)


def _percentile(sizes: Sequence[tuple[float, int]], wanted: float) -> float:
    seen = 0
    for size, number in sizes:
        seen += number
        if seen >= wanted:
            return size
    return sizes[-1][0]


def _recent(columns: Mapping[str, MetricColumn], name: str) -> float:
    return columns[name].last(NEWEST).mean() if name in columns else 0.0
