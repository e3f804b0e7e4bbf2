"""Metrics of a run by name, as columns and bands for charts; and what they say of waits and of long answers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice, pairwise, takewhile
from typing import Final, NamedTuple, TypeAlias

from rlinf_core.runners.metrics import Metrics
from rlinf_core.runners.storage.profile import CallsOfSize
from rlinf_core.statistics import wilson_interval

# More points than pixels add nothing.
MOST_POINTS: Final = 300
# Values of a metric that say what is true now.
NEWEST: Final = 100
# Lines that are in memory at a time.
_PART: Final = 2000
Steps: TypeAlias = "MutableSequence[int]"
Values: TypeAlias = "MutableSequence[float]"


class Band(NamedTuple):
    """The values of a metric in a stretch of steps.

    Attributes:
        step: the median of the steps that have a value.
        mean: the mean of the values.
        low, high: the least and the greatest; of an evaluation its 95 % interval, None where that is not known.
    """

    step: float
    mean: float
    low: float | None
    high: float | None


@dataclass(slots=True)
class MetricColumn:
    """The values of one metric and their steps, in order; NaN where the run had no finite number."""

    steps: Steps = field(default_factory=lambda: array("q"))
    values: Values = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def last(self, count: int) -> MetricColumn:
        """Return the last values."""
        return MetricColumn(self.steps[-count:], self.values[-count:])

    def where(self, wanted: Callable[[int, float], bool]) -> MetricColumn:
        """Return the steps whose number and value are wanted."""
        kept = [pair for pair in zip(self.steps, self.values, strict=True) if wanted(*pair)]
        return MetricColumn(array("q", [step for step, _ in kept]), array("d", [value for _, value in kept]))

    def finite(self) -> MetricColumn:
        """Return the steps with a finite value."""
        return self if all(map(math.isfinite, self.values)) else self.where(lambda _, value: math.isfinite(value))

    def since(self, lowest: float, highest: float) -> int | None:
        """Return the first step of the values at the end that all lie within bounds; None if the last does not."""
        inside = sum(1 for _ in takewhile(lambda value: lowest <= value <= highest, reversed(self.values)))
        return self.steps[-inside] if inside else None

    def mean(self) -> float:
        """Return the mean of the values; 0 without one."""
        return math.fsum(self.values) / len(self.values) if self.values else 0.0

    def bands(self, most: int = MOST_POINTS) -> list[Band]:
        """Return at most `most` bands of about equally many values; a short column unchanged."""
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
        times: when each of them was written, in seconds since 1970.
    """

    columns: dict[str, MetricColumn] = field(default_factory=dict[str, MetricColumn])
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list[tuple[int, Mapping[str, float]]])
    steps: Steps = field(default_factory=lambda: array("q"))
    times: Values = field(default_factory=lambda: array("d"))

    @property
    def pace(self) -> float | None:
        """Steps a second; None where it is not known."""
        if len(self.steps) < 2 or self.steps[0] >= self.steps[-1]:
            return None
        return (self.steps[-1] - self.steps[0]) / max(self.times[-1] - self.times[0], 1e-9)

    @cached_property
    def finite(self) -> dict[str, MetricColumn]:
        """The columns without values that are not finite; none of a metric that has no other."""
        columns = {name: column.finite() for name, column in self.columns.items()}
        return {name: column for name, column in columns.items() if len(column)}


def series_of(lines: Iterable[Metrics]) -> RunSeries:
    """Return the metrics of a run by name. Reads the lines once."""
    series, rest = RunSeries(), iter(lines)
    while part := list(islice(rest, _PART)):
        # Lines of the same metrics are turned into columns together, which is several times as fast.
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
    """Return every evaluation's value of `metric`, with its 95 % interval where one is known."""
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
        metric: its full name, below `eval/`; it has a value.
        metrics: all metrics of the same evaluation.
    """
    space, _, name = metric.rpartition("/")
    low, high = metrics.get(f"{metric}_low"), metrics.get(f"{metric}_high")
    episodes = metrics.get(f"{space}/episodes", metrics.get(f"{space}/answers"))
    count = int(episodes) if episodes else None
    if low is None and name.startswith("success") and count:
        low, high = wilson_interval(metrics[metric] * count, count)
    return low, high, count


def newest_of(columns: Mapping[str, MetricColumn]) -> dict[str, float]:
    """Return the last value of each metric."""
    return {name: column.values[-1] for name, column in columns.items()}


# Another placement is predicted within 4 % of its step, and at worst 10 %: a wait below that is no sure gain.
MATTERS: Final = 0.1
# Answers that a percentile needs.
_FEWEST_ANSWERS: Final = 100
_STEP, _GENERATE, _ENGINE, _ANSWER = "time/step", "time/generate_rollouts", "engine/step", "answer"
_ENV, _ROLLOUT, _ACTOR = "env", "rollout", "actor"
_PARTNERS: Final = {_ENV: _ROLLOUT, _ROLLOUT: _ENV}

Units = Mapping[str, Collection[tuple[int, int | None]]]
"""What each component's processes are on: nodes, each with an accelerator or None."""


class ComponentWait(NamedTuple):
    """A component that waits for another.

    Attributes:
        who, whom: the two; `whom` may be no component, as in `scores and messages`.
        share: the part of a step that it waits.
        source: what shows it.
        in_turns: whether it has no hardware that the other does not have: then they take turns, and none is idle.
    """

    who: str
    whom: str
    share: float
    source: str
    in_turns: bool = False

    @property
    def matters(self) -> bool:
        """Whether hardware is idle for longer than predictions of other placements err."""
        return self.share >= MATTERS and not self.in_turns

    @property
    def words(self) -> str:
        """The wait in words: `actor waits for rollout for 61 % of a step`."""
        turns = ", in turns on the same hardware" if self.in_turns else ""
        return f"{self.who} waits for {self.whom} for {self.share:.0%} of a step{turns}".replace("%", " %")


class LengthTail(NamedTuple):
    """Lengths of answers, in tokens, and what the longest cost.

    Attributes:
        middle, percentile, longest: half of the answers are no longer, 99 % are, and the longest one.
        last, of: the number of an engine's answers that are the longest 1 %, at least one, and the whole number.
        generation: the part of the engines' time in which no others are left.
        step: the same as a part of a step.
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
        """Whether other answers meanwhile would be a sure gain."""
        return self.step >= MATTERS

    @property
    def cost(self) -> str:
        """The cost of the longest in words."""
        which = "1 %" if self.last > 1 else f"1 of {self.of}"
        shares = f"{self.generation:.0%} of generation, {self.step:.0%} of a step".replace("%", " %")
        return f"the longest {which} of answers take {shares}"

    @property
    def lengths(self) -> str:
        """The lengths in words."""
        return f"tokens of an answer: median {self.middle:.0f}, p99 {self.percentile:.0f}, longest {self.longest:.0f}"


def waits_of(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize], units: Units) -> list[ComponentWait]:
    """Return who waits for whom in the newest steps, the longest first.

    Args:
        columns: the metrics of the run.
        calls: the timed calls of its processes.
        units: what each component's processes are on; a component that it lacks is on hardware of its own.
    """
    waits = [
        wait._replace(in_turns=_in_turns(wait, units)) for wait in _every_wait(columns, calls) if wait.share >= 0.005
    ]
    return sorted(waits, key=lambda wait: (wait.in_turns, -wait.share))


def _in_turns(wait: ComponentWait, units: Units) -> bool:
    own, others = units.get(wait.who), units.get(wait.whom)
    if own is None:
        return False
    # What is no component leaves accelerators idle, and processors to others.
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
    seconds = sum(map(sum, (columns[name].values for name in (_STEP, "time/evaluate") if name in columns)))
    if steps and seconds:
        busy = sum(row.seconds for row in steps) / max(row.processes for row in steps) / seconds
        whom = "tools, scores and messages" if "agent/turns" in columns else "scores and messages"
        yield ComponentWait(_ROLLOUT, whom, max(0.0, generate - busy), f"{_ENGINE} of profile.json")


def tail_of(columns: Mapping[str, MetricColumn], calls: Sequence[CallsOfSize]) -> LengthTail | None:
    """Return the tail of the lengths of a run's answers; None for a run without, or with too few."""
    answers = sorted((row.rows, row.calls) for row in calls if row.phase == _ANSWER)
    number = sum(calls for _, calls in answers)
    steps = [row for row in calls if row.phase == _ENGINE and row.rows]
    step = _recent(columns, _STEP)
    if number < _FEWEST_ANSWERS or not steps or not step:
        return None
    # Every step begins with all of its answers; an evaluation may have more, and there are few of them.
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
