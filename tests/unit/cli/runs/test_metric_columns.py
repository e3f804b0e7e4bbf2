"""Metrics over steps: as columns, and as the bands of charts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlinf_cli.runs.metric_columns import MOST_POINTS, Band, MetricColumn, evaluated, series_of
from rlinf_cli.runs.x_axis import XAxis
from rlinf_core.runners.metrics import Metrics, MetricsWriter, metrics_in


@pytest.mark.parametrize("count", [1, 7, 2600, 100_000])
def test_column_of_any_length_is_a_few_bands_with_its_peaks(count: int) -> None:
    values = [math.sin(step / 50) for step in range(count)]
    values[count // 2], values[count // 3] = 9.0, -9.0
    column = MetricColumn(list(range(count)), values)
    bands = column.bands()
    assert len(bands) == min(count, MOST_POINTS)
    assert (max(band.high or 0 for band in bands), min(band.low or 0 for band in bands)) == (max(values), min(values))
    assert [band.step for band in bands] == sorted(band.step for band in bands)
    assert math.isclose(column.mean(), sum(values) / count, abs_tol=1e-12)


def test_short_column_is_kept() -> None:
    assert MetricColumn([1, 2], [0.5, 1.5]).bands() == [Band(1, 0.5, 0.5, 0.5), Band(2, 1.5, 1.5, 1.5)]
    assert MetricColumn().bands() == []


def test_metrics_become_columns_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.log(1, {"env/return": 1.0, "train/loss": math.nan, "time/step": 2.0})
        metrics.log(2, {"env/return": 3.0, "time/step": 1.0, "eval/success_once": 0.5, "eval/episodes": 64.0})
    path.write_text(path.read_text() + '{"torn')
    series = series_of(metrics_in(path))
    assert list(series.steps) == [1, 2]
    assert [(band.step, band.mean) for band in series.finite()["env/return"].bands()] == [(1, 1.0), (2, 3.0)]
    # What is not finite is kept, and left out of charts.
    assert "train/loss" not in series.finite()
    assert math.isnan(series.columns["train/loss"].values[0])
    (point,) = evaluated("eval/success_once", series.evaluations)
    assert point.low is not None
    assert point.high is not None
    assert point.step == 2
    assert 0.37 < point.low < 0.39
    assert point.low + point.high == 1.0


def test_values_at_the_end_lie_within_bounds_since_a_step() -> None:
    column = MetricColumn([1, 2, 4, 5], [0.0, 3.0, 1.0, 0.5])
    assert (column.since(0.0, 1.0), column.since(0.0, 3.0), column.since(2.0, 3.0)) == (4, 1, None)
    assert MetricColumn([1, 2], [1.0, math.nan]).since(0.0, 2.0) is None
    assert list(column.last(2).values) == [1.0, 0.5]
    chosen = column.where(lambda step, value: step > 1 and value > 0.5)
    assert (list(chosen.steps), list(chosen.values)) == ([2, 4], [3.0, 1.0])


def test_pace_is_that_between_the_first_and_the_last_step() -> None:
    lines = [Metrics(step, 10.0 * step, {"a": 0.0}) for step in (1, 2, 5)]
    assert series_of(lines).pace == pytest.approx(0.1)
    assert series_of(lines[:1]).pace is None


def test_intervals_that_were_written_are_used() -> None:
    metrics = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.7}
    assert evaluated("eval/pass@1", [(3, metrics), (4, {})]) == [(3, 0.5, 0.4, 0.7)]


def test_places_on_an_axis_add_up_what_steps_counted() -> None:
    lines = [Metrics(1, 0.0, {"env/steps": 512.0}), Metrics(2, 0.0, {"a": 1.0}), Metrics(3, 0.0, {"env/steps": 256.0})]
    series = series_of(lines)
    assert XAxis.ENV_STEPS.of(series) == {1: 512.0, 2: 512.0, 3: 768.0}
    assert XAxis.STEP.of(series) == {1: 1.0, 2: 2.0, 3: 3.0}
