"""Metric series for charts: columns of `metrics.jsonl`, long ones downsampled to means with bands."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby, islice, pairwise
from typing import Final, NamedTuple

from rlinf_cli.runs.metric_comparison import interval_of
from rlinf_core.runners.metrics import Metrics

# More points than pixels add nothing.
MOST_POINTS: Final = 300
# Values of a metric that are kept as they are, for what is true now.
NEWEST: Final = 100
# Lines that are in memory at a time.
_PART: Final = 2000


class Band(NamedTuple):
    """The values of a metric in a stretch of steps.

    Attributes:
        step: the median of the steps that have a value.
        mean: the mean of the values.
        low, high: the least and the greatest.
    """

    step: int
    mean: float
    low: float
    high: float


class Column:
    """The finite values of one metric, in order of their steps, reduced while they are read.

    Memory and the work of a chart do not grow with the steps: there are at most `2 * MOST_POINTS` bands of equally many
    values, and those of the next band as they are.

    Attributes:
        count: the number of values added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._stride = 1
        self._bands: list[Band] = []
        # Values after the last band.
        self._steps: list[int] = []
        self._values: list[float] = []
        self._newest: deque[float] = deque(maxlen=NEWEST)

    @property
    def last(self) -> float:
        """The value of the last step."""
        return self._newest[-1]

    @property
    def newest(self) -> Sequence[float]:
        """The values of at most the `NEWEST` last steps."""
        return self._newest

    @property
    def is_zero(self) -> bool:
        """Whether all values are zero."""
        return not any(band.low or band.high for band in self._bands) and not any(self._values)

    def is_like(self, other: Column) -> bool:
        """Return whether the other one would be drawn the same."""
        return self._whole() == other._whole()

    def mean(self) -> float:
        """Return the mean of all values."""
        return (math.fsum(band.mean for band in self._bands) * self._stride + math.fsum(self._values)) / self.count

    def extend(self, steps: Iterable[int], values: Sequence[float]) -> None:
        """Add the values of later steps."""
        self.count += len(values)
        self._steps.extend(steps)
        self._values.extend(values)
        self._newest.extend(values[-NEWEST:])
        while len(self._values) > self._stride:
            size = self._stride
            whole = (len(self._values) - 1) // size
            room = 2 * MOST_POINTS - len(self._bands)
            end = min(whole, room) * size
            self._bands += _bands(self._steps[:end], self._values[:end], range(0, end + 1, size))
            del self._steps[:end], self._values[:end]
            if whole > room or len(self._bands) == 2 * MOST_POINTS:
                self._bands = _merged(self._bands, 2, [1] * len(self._bands))
                self._stride *= 2

    def bands(self, most: int = MOST_POINTS) -> list[Band]:
        """Return at most `most` bands of about equally many values; a short series unchanged."""
        bands, size = self._whole(), self._stride
        # The last band may have fewer values.
        weights = [min(size, self.count - start) for start in range(0, self.count, size)]
        return bands if len(bands) <= most else _merged(bands, math.ceil(len(bands) / most), weights)

    def _whole(self) -> list[Band]:
        size, count = self._stride, len(self._values)
        bounds = [*range(0, count, size), count] if count else [0]
        return [*self._bands, *_bands(self._steps, self._values, bounds)]


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
        columns: the columns by the metrics' names.
        evaluations: (step, metrics) of each step that was evaluated.
        moments: (step, end as seconds since 1970, duration in seconds) of the steps that recorded it.
        steps: the number of steps with metrics.
        first, last: the step of the first and last line, and its seconds since 1970; None without any.
    """

    columns: dict[str, Column] = field(default_factory=dict[str, Column])
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list[tuple[int, Mapping[str, float]]])
    moments: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    steps: int = 0
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    @property
    def pace(self) -> float | None:
        """Steps a second; None where it is not known."""
        if self.first is None or self.last is None or self.first[0] >= self.last[0]:
            return None
        (step, began), (last_step, ended) = self.first, self.last
        return (last_step - step) / max(ended - began, 1e-9)

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
                column.extend(compress(steps, finite), list(compress(values, finite)))
        if any(name.startswith("eval/") for name in lines[0].metrics):
            self.evaluations += [(line.step, line.metrics) for line in lines]
        for line in lines:
            seconds = line.metrics.get("time/step", math.nan)
            if math.isfinite(seconds):
                self.moments.append((line.step, line.time, seconds))
        self.steps += len(lines)
        self.first = self.first or (lines[0].step, lines[0].time)
        self.last = lines[-1].step, lines[-1].time


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
    return _bands(steps, values, bounds)


def _bands(steps: Sequence[int], values: Sequence[float], bounds: Sequence[int]) -> list[Band]:
    """Return the bands between each two of the bounds."""
    bands: list[Band] = []
    for start, end in pairwise(bounds):
        part = values[start:end]
        bands.append(Band(steps[(start + end - 1) // 2], math.fsum(part) / (end - start), min(part), max(part)))
    return bands


def _merged(bands: Sequence[Band], size: int, weights: Sequence[int]) -> list[Band]:
    """Return each `size` bands as one; the weights are how many values they have."""
    merged: list[Band] = []
    for start in range(0, len(bands), size):
        part, counts = bands[start : start + size], weights[start : start + size]
        mean = math.fsum(band.mean * count for band, count in zip(part, counts, strict=True)) / sum(counts)
        middle = part[(len(part) - 1) // 2].step
        merged.append(Band(middle, mean, min(band.low for band in part), max(band.high for band in part)))
    return merged


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
