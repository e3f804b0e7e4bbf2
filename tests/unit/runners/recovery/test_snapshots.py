"""When snapshots are due: by time, and never so often that they take more than 1 % of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.runners.recovery.snapshots import SnapshotSchedule


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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
