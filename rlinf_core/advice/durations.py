"""Durations of calls as functions of their rows, fitted to the records of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, NamedTuple

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
