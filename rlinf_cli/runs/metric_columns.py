"""Metrics of a run by name: each one over its steps, and long ones as means with bands for charts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise, takewhile
from typing import Final, NamedTuple, TypeAlias

from rlinf_cli.runs.metric_comparison import interval_of
from rlinf_core.runners.metrics import Metrics

# More points than pixels add nothing.
MOST_POINTS: Final = 300
# Values of a metric that say what is true now.
NEWEST: Final = 100
# Lines that are in memory at a time.
_PART: Final = 2000
Steps: TypeAlias = "MutableSequence[int]"
Values: TypeAlias = "MutableSequence[float]"


def _no_steps() -> Steps:
    return array("q")


def _no_values() -> Values:
    return array("d")


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

    steps: Steps = field(default_factory=_no_steps)
    values: Values = field(default_factory=_no_values)

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
    steps: Steps = field(default_factory=_no_steps)
    times: Values = field(default_factory=_no_values)

    @property
    def pace(self) -> float | None:
        """Steps a second; None where it is not known."""
        if len(self.steps) < 2 or self.steps[0] >= self.steps[-1]:
            return None
        return (self.steps[-1] - self.steps[0]) / max(self.times[-1] - self.times[0], 1e-9)

    def finite(self) -> dict[str, MetricColumn]:
        """Return the columns without values that are not finite; none of a metric that has no other."""
        columns = {name: column.finite() for name, column in self.columns.items()}
        return {name: column for name, column in columns.items() if len(column)}

    def add(self, lines: Sequence[Metrics]) -> None:
        """Add later steps."""
        # Lines of the same metrics are turned into columns together, which is several times as fast.
        for names, group in groupby(lines, key=lambda line: tuple(line.metrics)):
            alike = list(group)
            steps = [line.step for line in alike]
            for name, values in zip(names, zip(*(line.metrics.values() for line in alike), strict=True), strict=True):
                column = self.columns.setdefault(name, MetricColumn())
                column.steps.extend(steps)
                column.values.extend(values)
            if any(name.startswith("eval/") for name in names):
                self.evaluations += [(line.step, line.metrics) for line in alike]
            self.steps.extend(steps)
            self.times.extend(line.time for line in alike)


def series_of(lines: Iterable[Metrics]) -> RunSeries:
    """Return the metrics of a run by name. Reads the lines once."""
    series, rest = RunSeries(), iter(lines)
    while part := list(islice(rest, _PART)):
        series.add(part)
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


def newest_of(columns: Mapping[str, MetricColumn]) -> dict[str, float]:
    """Return the last value of each metric."""
    return {name: column.values[-1] for name, column in columns.items()}
