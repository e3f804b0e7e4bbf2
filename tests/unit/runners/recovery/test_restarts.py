"""How often a run is started again, in all and within a time."""

from __future__ import annotations

import pytest

from rlinf_core.config.sections.runner import RestartLimit, RunnerConfig
from rlinf_core.runners.recovery.restarts import Restart, Restarts


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
