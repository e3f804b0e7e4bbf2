"""What the record of a run leaves behind, however the run ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlinf_core.cluster import engine
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.seats import NodeChange
from rlinf_core.config.sections.runner import LoggerConfig, RunnerConfig
from rlinf_core.errors import CheckpointError
from rlinf_core.runners import events, record
from rlinf_core.runners.events import Event
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.trace import TraceWriter


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def run(tmp_path: Path, emitted: list[Event]) -> RunRecord:
    folder = RunFolder.create(RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path))), "embodied")
    trace = TraceWriter(folder.trace_file)
    return RunRecord(folder, MetricsWriter(folder.metrics_file), emitted.append, trace=trace)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ExceptionGroup(
            "two ranks failed", [OSError("8000 requested and 16 written"), ValueError("No space left on device")]
        ),
    ],
)
def test_half_a_checkpoint_is_not_left_on_a_full_disk(run: RunRecord, error: Exception) -> None:
    def write(path: Path) -> None:
        (path / "weights").write_text("half")
        raise error

    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        run.save(1, write, weight_version=1, world_sizes={})
    assert str(caught.value.why).startswith("No space left on device: the disk has ")
    assert list(run.folder.checkpoints.folder.iterdir()) == []


def test_what_a_worker_says_of_a_full_disk_is_not_said_again(run: RunRecord) -> None:
    theirs = ExceptionGroup(
        "one failed", [CheckpointError("the weights cannot be written", why="No space left on device")]
    )

    def write(path: Path) -> None:
        raise theirs

    with pytest.raises(ExceptionGroup) as caught:
        run.save(1, write, weight_version=1, world_sizes={})
    assert caught.value is theirs
    assert list(run.folder.checkpoints.folder.iterdir()) == []


def test_ending_the_workers_is_not_counted(
    run: RunRecord, emitted: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: clock.now))
    run.started(1, {"actor": 1})
    clock.now += 3
    run.step_finished(1, {})
    clock.now += 2
    run.evaluated(1, {"eval/return": 1.0})
    clock.now += 60
    run.finished()
    (finished,) = [message for message in emitted if isinstance(message, events.RunFinished)]
    assert finished.seconds == 5.0


def test_the_state_says_where_the_cluster_is(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunFolder.open(run.folder.path).state.address == ""
    monkeypatch.setattr(engine, "current", lambda: engine.RayEngine("10.0.0.1:6379", embedded=False))
    cluster: Any = SimpleNamespace(record=lambda *_, **__: None, topology=None, changes=())
    run.watch(cast("Cluster", cluster), {})
    assert RunFolder.open(run.folder.path).state.address == "10.0.0.1:6379"


def test_changes_of_the_nodes_are_told_once(run: RunRecord, emitted: list[Event]) -> None:
    serves = NodeChange(1, "node 3, a spare, serves as node 1", "node 1 joined and was lost")
    without = NodeChange(2, "`env` goes on without node 2", "node 2 joined and was lost")
    for changes in ((), (serves,), (serves,), (serves, without), (without,), ()):
        cluster: Any = SimpleNamespace(record=lambda *_, **__: None, topology=None, changes=changes)
        run.watch(cast("Cluster", cluster), {})
    assert [event[1:] for event in emitted if isinstance(event, events.NodesChanged)] == [
        (serves.text, (serves.reason,)),
        (without.text, (without.reason,)),
        ("node 1 is back", ()),
        ("node 2 is back", ()),
    ]
