"""Series of metrics for pictures."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path

import pytest

from rlinf_cli.report.series import MOST_POINTS, NEWEST, Band, Column, banded, evaluated, series_of, telling_steps
from rlinf_core.runners.metrics import MetricsWriter, metrics_in


def test_a_short_series_is_kept_and_a_long_one_keeps_its_peaks() -> None:
    assert banded([1, 2], [0.5, 1.5]) == [Band(1, 0.5, 0.5, 0.5), Band(2, 1.5, 1.5, 1.5)]
    steps = list(range(100_000))
    values = [0.0] * 100_000
    values[51_234], values[7] = 9.0, -3.0
    bands = banded(steps, values, most=300)
    assert len(bands) == 300
    assert max(band.high for band in bands) == 9.0
    assert min(band.low for band in bands) == -3.0
    assert [band.step for band in bands] == sorted(band.step for band in bands)
    assert banded([], []) == []


def test_metrics_become_columns_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.log(1, {"env/return": 1.0, "train/loss": math.nan, "time/step": 2.0})
        metrics.log(2, {"env/return": 3.0, "time/step": 1.0, "eval/success_once": 0.5, "eval/episodes": 64.0})
    path.write_text(path.read_text() + '{"torn')
    series = series_of(metrics_in(path))
    assert series.steps == 2
    assert [(band.step, band.mean) for band in series.columns["env/return"].bands()] == [(1, 1.0), (2, 3.0)]
    assert "train/loss" not in series.columns
    (point,) = evaluated("eval/success_once", series.evaluations)
    assert point.step == 2
    assert point.low is not None
    assert point.high is not None
    assert 0.37 < point.low < 0.39
    assert point.low + point.high == 1.0
    assert [(step, seconds) for step, _, seconds in series.moments] == [(1, 2.0), (2, 1.0)]


@pytest.mark.parametrize("part", [1, 7, 2000])
def test_column_of_any_length_is_a_few_bands(part: int) -> None:
    column = Column()
    values = [math.sin(step / 50) for step in range(2600)]
    values[1234], values[2321] = 9.0, -9.0
    highest, lowest = list(accumulate(values, max)), list(accumulate(values, min))
    for start in range(0, len(values), part):
        added = min(start + part, len(values))
        column.extend(range(start, added), values[start:added])
        bands = column.bands()
        assert len(bands) <= MOST_POINTS
        assert max(band.high for band in bands) == highest[added - 1]
        assert min(band.low for band in bands) == lowest[added - 1]
    assert math.isclose(column.mean(), sum(values) / len(values), abs_tol=1e-12)
    assert list(column.newest) == values[-NEWEST:]
    assert (column.count, column.last) == (2600, values[-1])


def test_intervals_that_were_written_are_used() -> None:
    metrics = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.7}
    assert evaluated("eval/pass@1", [(3, metrics), (4, {})]) == [(3, 0.5, 0.4, 0.7)]


def test_telling_steps_leave_the_first_one_out() -> None:
    assert telling_steps([]) == {}
    assert telling_steps([(1, 0.0, 5.0)]) == {"slowest": 1, "median": 1, "last": 1}
    moments = [(1, 0.0, 50.0), (2, 1.0, 1.0), (3, 2.0, 9.0), (4, 3.0, 2.0)]
    assert telling_steps(moments) == {"slowest": 3, "median": 4, "last": 4}
