"""Decisions of a run's recovery: restarts, snapshots, and items that processes died of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.sections.runner import RestartLimit, RunnerConfig
from rlinf_core.runners.recovery import Restart, Restarts, SnapshotSchedule, Suspects


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_number_counts_over_the_whole_run() -> None:
    clock = Clock()
    restarts = Restarts(RestartLimit(max=2), clock)
    assert restarts.allow("env") == Restart(1, 2)
    clock.now = 1e6
    assert restarts.allow("actor") == Restart(2, 2)
    assert restarts.allow("rollout") is None


def test_window_forgets_restarts_that_are_older() -> None:
    clock = Clock()
    restarts = Restarts(RestartLimit(max=2, within="10m"), clock)
    assert restarts.allow("env") == Restart(1, 2)
    clock.now = 500.0
    assert restarts.allow("env") == Restart(2, 2)
    assert restarts.allow("env") is None
    clock.now = 600.0
    assert restarts.allow("env") == Restart(2, 2)
    clock.now = 1099.0
    assert restarts.allow("env") is None


def test_window_is_one_for_each_component() -> None:
    restarts = Restarts(RestartLimit(max=1, within="1h"), Clock())
    assert restarts.allow("env") == Restart(1, 1)
    assert restarts.allow("reward") == Restart(1, 1)
    assert restarts.allow("env") is None


def test_no_restart_at_all() -> None:
    assert Restarts(RestartLimit(max=0), Clock()).allow("env") is None


@pytest.mark.parametrize(
    ("written", "limit", "seconds"),
    [(5, 5, None), ({"max": 3, "within": "10m"}, 3, 600.0), ({"within": "2h"}, 3, 7200.0), ({}, 3, None)],
)
def test_number_and_window_are_read_from_a_file(written: object, limit: int, seconds: float | None) -> None:
    read = RunnerConfig.model_validate({"max_restarts": written}).max_restarts
    assert (read.max, read.seconds) == (limit, seconds)


@given(cost=st.floats(0.001, 30), step=st.floats(0.01, 20), interval=st.floats(1, 60))
def test_snapshots_take_one_percent_at_most(cost: float, step: float, interval: float) -> None:
    clock = Clock()
    schedule = SnapshotSchedule(interval, clock)
    spent, unsaved, longest = 0.0, 0.0, 0.0
    for _ in range(3000):
        clock.now += step
        unsaved += step
        longest = max(longest, unsaved)
        if schedule.due:
            with schedule.saving():
                clock.now += cost
            spent, unsaved = spent + cost, 0.0
    # The first one comes after the interval, whatever it will take.
    assert spent <= 0.01 * clock.now + cost
    assert longest <= max(interval, 100 * cost) + 2 * step


def test_none_is_due_without_an_interval() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(None, clock)
    clock.now = 1e6
    assert not schedule.due


def test_none_is_due_after_the_last_one() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(60.0, clock)
    clock.now = 61.0
    assert schedule.due
    schedule.stop()
    assert not schedule.due


SHARE = {"1": "one", "2": "two", "3": "three"}


def test_items_of_one_death_are_not_suspected() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.died_of(SHARE, "`rollout:0` died")
    assert suspects.due() == {}


def test_items_of_two_deaths_are_tried_alone() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.died_of(SHARE, "first")
    suspects.died_of({"2": "two", "9": "nine"}, "second")
    assert suspects.due() == {"2": "two"}


def test_item_that_kills_alone_is_set_aside_with_its_deaths() -> None:
    suspects: Suspects[str] = Suspects()
    for reason in ("first", "second"):
        suspects.died_of(SHARE, reason)
    suspects.lived("1")
    assert suspects.killed("2", "third") == ["first", "second", "third"]
    assert suspects.set_aside == {"2"}
    assert suspects.due() == {"3": "three"}
    suspects.died_of(SHARE, "fourth")
    assert "2" not in suspects.due()


def test_named_item_is_set_aside_at_the_third_death() -> None:
    suspects: Suspects[str] = Suspects()
    deaths = [suspects.died_of_one("2", "two", reason) for reason in ("first", "second", "third", "fourth")]
    assert deaths == [[], [], ["first", "second", "third"], []]
    assert suspects.set_aside == {"2"}


def test_item_that_was_there_by_chance_is_forgotten() -> None:
    suspects: Suspects[str] = Suspects()
    for reason in ("first", "second"):
        suspects.died_of(SHARE, reason)
    for name in SHARE:
        suspects.lived(name)
    suspects.died_of(SHARE, "third")
    assert (suspects.due(), suspects.set_aside) == ({}, frozenset())
