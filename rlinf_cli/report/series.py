"""Metric series for charts: columns of `metrics.jsonl`, long ones downsampled to means with bands."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby, islice, pairwise
from typing import Final, NamedTuple

from rlinf_cli.runs.metric_comparison import interval_of
from rlinf_core.runners.metrics import Metrics

# More points than pixels add nothing.
MOST_POINTS: Final = 300
# Lines that are in memory at a time.
_PART: Final = 2000


@dataclass
class Column:
    """The finite values of one metric and their steps, in order."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Band(NamedTuple):
    """The values of a metric in a stretch of steps.

    Attributes:
        step: the median of the steps that have a value.
        mean: of the values.
        low, high: the least and the greatest.
    """

    step: int
    mean: float
    low: float
    high: float


class EvaluatedPoint(NamedTuple):
    """The result of one evaluation with its interval, which is None where it is not known."""

    step: int
    value: float
    low: float | None
    high: float | None


@dataclass
class RunSeries:
    """All metrics of a run.

    Attributes:
        columns: by the metrics' names.
        evaluations: (step, metrics) of each step that was evaluated.
        moments: (step, end as seconds since 1970, duration in seconds) of the steps that recorded it.
        steps: how many steps have metrics.
        first, last: the seconds since 1970 of the first and last line; None without any.
    """

    columns: dict[str, Column] = field(default_factory=dict[str, Column])
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list[tuple[int, Mapping[str, float]]])
    moments: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    steps: int = 0
    first: float | None = None
    last: float | None = None

    def add(self, lines: Sequence[Metrics]) -> None:
        """Add later steps. Keeps numbers only."""
        # Lines of the same metrics are turned into columns together, which is several times as fast.
        for _, group in groupby(lines, key=lambda line: tuple(line.metrics)):
            self._add_alike(list(group))

    def _add_alike(self, lines: Sequence[Metrics]) -> None:
        steps = [line.step for line in lines]
        for name, values in zip(
            lines[0].metrics, zip(*(line.metrics.values() for line in lines), strict=True), strict=True
        ):
            finite = list(map(math.isfinite, values))
            if any(finite):
                column = self.columns.setdefault(name, Column())
                column.steps.extend(compress(steps, finite))
                column.values.extend(compress(values, finite))
        if any(name.startswith("eval/") for name in lines[0].metrics):
            self.evaluations += [(line.step, line.metrics) for line in lines]
        for line in lines:
            seconds = line.metrics.get("time/step", math.nan)
            if math.isfinite(seconds):
                self.moments.append((line.step, line.time, seconds))
        self.steps += len(lines)
        self.first = lines[0].time if self.first is None else self.first
        self.last = lines[-1].time

    def drop_step(self, step: int) -> None:
        """Drop the last step, whose metrics come again."""
        for name, column in list(self.columns.items()):
            if column.steps[-1] == step:
                column.steps.pop()
                column.values.pop()
            if not column.steps:
                del self.columns[name]
        for rows in (self.evaluations, self.moments):
            if rows and rows[-1][0] == step:
                rows.pop()
        self.steps -= 1


def series_of(lines: Iterable[Metrics]) -> RunSeries:
    """Return the metrics of a run by name. Reads the lines once."""
    series, rest = RunSeries(), iter(lines)
    while part := list(islice(rest, _PART)):
        series.add(part)
    return series


def banded(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> list[Band]:
    """Return a series as at most `most` bands of equally many values; a short one unchanged."""
    count = len(steps)
    bounds = range(count + 1) if count <= most else [count * number // most for number in range(most + 1)]
    bands: list[Band] = []
    for start, end in pairwise(bounds):
        part = values[start:end]
        bands.append(Band(steps[(start + end - 1) // 2], math.fsum(part) / (end - start), min(part), max(part)))
    return bands


def evaluated(metric: str, evaluations: Iterable[tuple[int, Mapping[str, float]]]) -> list[EvaluatedPoint]:
    """Return every evaluation's value of `metric`, with its 95 % interval where one is known."""
    points: list[EvaluatedPoint] = []
    for step, metrics in evaluations:
        value = metrics.get(metric, math.nan)
        if math.isfinite(value):
            low, high, _ = interval_of(metric, metrics)
            points.append(EvaluatedPoint(step, value, low, high))
    return points


def telling_steps(moments: Sequence[tuple[int, float, float]]) -> dict[str, int]:
    """Return three representative steps: the slowest, the one of median duration, and the last.

    The first step of a run, which compiles and fills caches, is left out where there are others.
    """
    timed = list(moments[1:] if len(moments) > 1 else moments)
    if not timed:
        return {}
    ordered = sorted(timed, key=lambda moment: moment[2])
    return {"slowest": ordered[-1][0], "median": ordered[(len(ordered) - 1) // 2][0], "last": timed[-1][0]}
