"""The trace: a file that the viewers read, whatever becomes of the workers and of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.errors import RunError, WorkerDiedError
from rlinf_core.process import tracing
from rlinf_core.process.tracing import Taken, TraceSpan
from rlinf_core.runners import events
from rlinf_core.runners.trace import TraceWriter


class Group:
    """Answers as a group of one worker does: at once, later, or never."""

    def __init__(self, name: str, *, busy: bool = False, dead: bool = False) -> None:
        self.worker_group_name = name
        self.busy = busy
        self.dead = dead
        self.asked = 0

    def take_spans(self) -> Group:
        self.asked += 1
        return self

    def done(self) -> bool:
        return not self.busy

    def wait(self, timeout: float | None = None) -> list[Taken]:
        assert timeout is not None
        if self.dead:
            raise WorkerDiedError(f"{self.worker_group_name}:0")
        return [Taken([TraceSpan(tracing.METHOD, f"answer {self.asked}", 1.0, 0.5, 7)], 1)]


def written(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def named(path: Path, phase: str) -> list[str]:
    return [event["name"] for event in written(path) if event["ph"] == phase]


def test_spans_become_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.add(
            "actor:0",
            Taken(
                [
                    TraceSpan(tracing.TIMER, "inner", 100.5, 0.25, 11),
                    TraceSpan(tracing.METHOD, "run_training", 100.0, 1.0, 11),
                    TraceSpan(tracing.TRANSFER, "send to env:0", 100.0, 0.5, 12),
                ],
                0,
            ),
        )
        writer.add("env:0", Taken([TraceSpan(tracing.WAIT, "recv from actor:0", 100.0, 0.5, 11)], 2))
    result = written(path)
    complete = {event["name"]: event for event in result if event["ph"] == "X"}
    assert complete["inner"]["ts"] == 100.5e6
    assert complete["inner"]["dur"] == 0.25e6
    assert complete["inner"]["tid"] == complete["run_training"]["tid"]
    assert complete["inner"]["pid"] != complete["recv from actor:0"]["pid"]
    begin, end = (next(event for event in result if event["ph"] == phase) for phase in "be")
    assert begin["id"] == end["id"]
    assert (begin["ts"], end["ts"]) == (100.0e6, 100.5e6)
    names = [event["args"]["name"] for event in result if event["name"] == "process_name"]
    assert names == ["actor:0", "env:0"]
    assert result[-1]["args"] == {"events": 2}


def test_a_busy_worker_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    quick, busy, dead = Group("env"), Group("rollout", busy=True), Group("actor", dead=True)
    groups = [quick, busy, dead]
    with TraceWriter(path) as writer:
        for _ in range(3):
            writer.collect(groups)
        assert (quick.asked, busy.asked, dead.asked) == (3, 1, 3)
        writer.collect(groups, last=True)
    assert named(path, "X") == [f"answer {number}" for number in (1, 2, 3, 4, 1, 2)]
    assert written(path)[-1]["args"]["events"] == 6


def test_phases_are_on_the_drivers_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    heard: list[object] = []
    with TraceWriter(path) as writer:
        listen = writer.listening(heard.append)
        listen(events.PhaseStarted(1, events.SYNC_WEIGHTS))
        listen(events.PhaseStarted(1, events.GENERATE_ROLLOUTS))
        listen(events.StepFinished(1, {}))
        listen(events.StepFinished(2, {}))
    assert len(heard) == 4
    assert named(path, "X") == ["sync_weights", "generate_rollouts"]


def test_it_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path, most=10) as writer:
        writer.add("env:0", Taken([TraceSpan(tracing.TIMER, "t", 0.0, 1.0, 1)] * 50, 0))
    assert len(written(path)) == 11
    assert written(path)[-1]["args"]["events"] == 43


def test_a_run_that_is_killed_leaves_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.collect([Group("env")])
    writer.collect([Group("env")])
    # As the viewers read it: the closing bracket may be missing.
    assert json.loads(path.read_text().rstrip().rstrip(",") + "]")
    TraceWriter(path).close()
    assert (tmp_path / "trace.1.json").exists()
    writer.close()


def test_it_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="trace cannot be written"):
        TraceWriter(tmp_path / "missing" / "trace.json")
