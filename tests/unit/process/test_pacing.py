"""Paced calls: they take as long as was recorded, and those on one accelerator take turns."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from rlinf_core.process import pacing
from rlinf_core.process.pacing import Pace, PacedCalls, Pacing
from rlinf_core.worker.timer import recording, timer


@pytest.fixture
def device() -> str:
    return uuid.uuid4().hex


def test_a_call_takes_as_long_as_its_rows_did(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = PacedCalls(Pacing({"env/step": Pace(0.02, 0.01), "env/late": Pace(0.0, 0.0)}))
    monkeypatch.setattr(pacing, "active", paced)
    with recording() as durations:
        with timer("env/step", 4):
            pass
        with timer("env/other", 4):
            pass
        with timer("env/late", 4):
            time.sleep(0.01)
    assert durations["env/step"] >= 0.06
    # No sleep behind what is not paced, or took longer by itself.
    assert durations["env/other"] < 0.06
    assert durations["env/late"] >= 0.01


def test_calls_that_varied_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("rlinf_core.process.pacing.time.sleep", slept.append)
    paced = PacedCalls(Pacing({"env/step": Pace(10.0, 0.0, (1.0, 3.0))}))
    for _ in range(20):
        paced.end("env/step", 1, time.perf_counter(), paced.begin("env/step"))
    assert {round(seconds, -1) for seconds in slept} == {10.0, 30.0}


def test_one_accelerator_serves_one_call_at_a_time(device: str) -> None:
    paces = Pacing({"work": Pace(0.002)})
    inside: list[int] = []
    most: list[int] = []

    def process() -> None:
        # Each as in a process of its own: they share nothing but the name of the accelerator.
        calls = PacedCalls(paces, device)
        for _ in range(10):
            holder = calls.begin("work")
            inside.append(1)
            most.append(len(inside))
            calls.end("work", 0, time.perf_counter(), None)
            inside.pop()
            assert holder is not None
            holder.close()

    threads = [threading.Thread(target=process) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max(most), len(most)) == (1, 30)


def test_others_wait_until_the_holder_ends_or_time_is_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = PacedCalls(Pacing({"work": Pace(0.0)}), device)
    holder = calls.begin("work")
    assert holder is not None
    assert calls.begin("other") is None
    monkeypatch.setenv("RLINF_TIMEOUT", "0.05")
    with pytest.raises(TimeoutError):
        calls.begin("work")
    holder.close()
    again = calls.begin("work")
    assert again is not None
    again.close()
