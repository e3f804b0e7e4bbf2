"""An evaluation lasts as long as it does, whatever becomes of the machine's clock."""

from __future__ import annotations

import time

import pytest

from rlinf_core.runners.step_clock import Stopwatch


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    watch = Stopwatch()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    times = watch.times()
    assert times["began"] == now
    assert 0 <= times["seconds"] < 3600
