"""Durations fitted to recorded calls: lines, one size, unlike accelerators, shared ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.job.flow import CallRow, Durations, fit_by_model, fit_duration, steady_or_spread


def row(rows: float, seconds: float, model: str = "", *, shared: bool = False) -> CallRow:
    return CallRow("env", "env/step", rows, model, 20, seconds, shared=shared)


@given(st.floats(0, 1), st.floats(0, 0.1))
def test_two_sizes_give_the_line_that_they_lie_on(fix: float, slope: float) -> None:
    duration = fit_duration([row(rows, fix + slope * rows) for rows in (8, 32)])
    assert duration.at(16) == pytest.approx(fix + slope * 16, abs=1e-9)
    assert not duration.one_size


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1e-4, 10)), min_size=1, max_size=5))
def test_neither_part_of_a_line_is_negative(points: list[tuple[float, float]]) -> None:
    duration = fit_duration([row(*point) for point in points])
    assert duration.fix >= 0
    assert duration.slope >= 0


def test_one_size_leaves_an_interval() -> None:
    duration = fit_duration([row(32, 0.4), row(40, 0.5)])
    low, high = duration.between()
    assert duration.one_size
    assert (low.at(64), high.at(64)) == (pytest.approx(2 * high.at(64)), high.at(1))


def test_many_calls_of_a_size_count_more_than_one_of_another() -> None:
    often = [row(8, 0.1)._replace(calls=100), row(16, 0.2)._replace(calls=100)]
    odd = row(12, 5.0)._replace(calls=1)
    assert fit_duration([*often, odd]).at(8) == pytest.approx(0.1, abs=0.04)


def test_calls_on_a_shared_accelerator_count_for_want_of_better() -> None:
    alone = [row(8, 0.2), row(32, 0.8)]
    assert fit_duration([*alone, row(16, 0.9, shared=True)]) == fit_duration(alone)
    assert fit_duration([row(16, 0.9, shared=True)]).at(16) == pytest.approx(0.9)


def test_an_unlike_accelerator_differs_by_a_factor() -> None:
    fits = fit_by_model([row(8, 0.18, "A800"), row(32, 0.42, "A800"), row(32, 0.84, "4090")])
    assert fits["4090"].at(8) == pytest.approx(0.36)
    assert not fits["4090"].one_size
    assert fits["4090"].extrapolates(8)


def test_a_phase_that_was_never_seen_on_a_model_has_no_duration() -> None:
    durations = Durations.of([row(8, 0.1, "A800")])
    assert durations.of_phase("env/step", "4090") is None
    assert durations.of_phase("other", "A800") is None
    assert durations.one_sized() == ["env/step on A800"]


def test_only_calls_that_vary_keep_their_spread() -> None:
    assert steady_or_spread([0.1] * 9 + [0.11]) == ()
    assert steady_or_spread([1.0] * 9 + [5.0]) == (*[1.0] * 9, 5.0)
