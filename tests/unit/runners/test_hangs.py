"""Standstills: who is named when, and what becomes of it; nobody while anything moves."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.runners import step_clock
from rlinf_core.runners.recovery import Restarts
from rlinf_core.runners.step_clock import HangWatch, OnHang, StepClock
from rlinf_core.supervision.verdicts import Standing

ENV = Standing("EnvGroup:1", "`EnvGroup:1` (pid 7) runs `interact` for 12 s, at env.py:3 in step")
JOB: Any = object()


class Hung:
    """A run whose steps took a second each, and whose last one finished so many seconds ago."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_hang: OnHang, *standing: Standing) -> None:
        self.now = 0.0
        self.clock = StepClock(lambda: self.now)
        for _ in range(4):
            self.now += 1
            self.clock.finished()
        self.ended: list[tuple[str, int, str]] = []
        self.record = SimpleNamespace(restarts=Restarts(RestartLimit(max=3)))
        group: Any = SimpleNamespace(worker_group_name="EnvGroup")
        self.watch = HangWatch(on_hang, {"env": group}, self.record, self.clock)  # type: ignore[arg-type]
        monkeypatch.setattr(step_clock, "held_up", lambda _, certain_only: [] if certain_only else list(standing))
        end = lambda group, rank, cause: self.ended.append((group.worker_group_name, rank, cause))  # noqa: E731
        monkeypatch.setattr(step_clock, "end_worker", end)

    def look(self, seconds: float) -> None:
        """Look after so many seconds without a step."""
        self.now = 4 + seconds
        self.watch.look(JOB, self.clock.quiet())


def test_step_is_slow_at_five_times_the_usual_one() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    now[0] = 100
    assert (clock.usual, clock.quiet()) == (None, 0)
    clock.finished()
    now[0] = 102
    clock.finished()
    now[0] = 111
    assert clock.quiet() == 0
    now[0] = 112
    assert (clock.usual, clock.quiet()) == (2, 10)
    clock.start_again()
    assert (clock.usual, clock.quiet()) == (2, 0)


def test_evaluations_have_a_duration_of_their_own() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    for now[0] in (0.0, 1.0):
        clock.finished()
    with clock.evaluation():
        now[0] = 61
        assert clock.quiet() == 0  # of the first one nobody knows how long it takes
    assert (clock.usual, clock.last, clock.quiet()) == (1, 61, 0)
    now[0] = 62
    clock.finished()
    assert clock.usual == 1
    with clock.evaluation():
        now[0] = 361
        assert clock.quiet() == 0
        now[0] = 362
        assert (clock.usual, clock.of_what, clock.quiet()) == (60, "evaluations", 300)
    now[0] = 367
    assert (clock.usual, clock.of_what, clock.quiet()) == (1, "ones", 5)


def test_holder_is_named_and_again_when_the_time_doubled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung = Hung(monkeypatch, "wait", ENV)
    with caplog.at_level(logging.WARNING, "rlinf"):
        for seconds in (4.9, 8, 11, 15.9, 16.1):
            hung.look(seconds)
    words = f"{ENV.how}; no step has finished for"
    assert caplog.messages == [f"{words} {time}, the last ones took 1 s each" for time in ("8.0 s", "16 s")]
    assert hung.ended == []


@pytest.mark.parametrize(("on_hang", "left"), [("restart", True), ("fail", False)])
def test_holder_is_ended_after_ten_seconds(monkeypatch: pytest.MonkeyPatch, on_hang: OnHang, left: bool) -> None:
    hung = Hung(monkeypatch, on_hang, ENV)
    hung.look(9.9)
    assert hung.ended == []
    hung.look(10.1)
    ((group, rank, cause),) = hung.ended
    assert (group, rank) == ("EnvGroup", 1)
    assert cause.startswith(f"`runner.on_hang: {on_hang}` ended it: {ENV.how}")
    assert (hung.record.restarts.allow("env") is not None) == left


@pytest.mark.parametrize("standing", [None, ENV._replace(is_debugged=True), ENV._replace(name="actions:0")])
def test_others_are_never_ended(monkeypatch: pytest.MonkeyPatch, standing: Standing | None) -> None:
    hung = Hung(monkeypatch, "restart", *([] if standing is None else [standing]))
    hung.look(60)
    assert hung.ended == []
