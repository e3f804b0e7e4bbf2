"""Failures that send a run back, how often, and the events; the groups by component; the record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from rlinf_core import runners, waiting
from rlinf_core.cluster import engine
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.membership import NodeChange
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.sections.runner import LoggerConfig, RestartLimit, RunnerConfig
from rlinf_core.errors import (
    ChannelClosed,
    CheckpointError,
    CommunicationTimeoutError,
    RayStartError,
    RuntimeFailure,
    WorkerDiedError,
)
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.load import load_job
from rlinf_core.placement.strategy import Placement
from rlinf_core.process.proc import Peak
from rlinf_core.runners import events as run_events
from rlinf_core.runners import record as run_record
from rlinf_core.runners import run_program
from rlinf_core.runners.events import Event, RunFinished, RunRestarted, Waiting
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import NodesReturned
from rlinf_core.runners.run_program import death, run_job, with_recovery
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.run_events import read_bundles
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.trace import TraceWriter
from rlinf_core.topology import ClusterTopology, NodeInfo
from rlinf_core.worker.timer import CallRecord, add_call

DEAD = WorkerGroupError("rollout", "generate", {0: WorkerDiedError("rollout:0", node="node 0")}, 1)
BROKEN = WorkerGroupError("env", "interact", {1: ValueError("no such joint"), 0: WorkerDiedError("env:1")}, 2)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def record(tmp_path: Path, events: list[Event]) -> RunRecord:
    folder = RunFolder.create(RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path))), "embodied")
    return RunRecord(folder, MetricsWriter(folder.metrics_file), events.append)


def test_a_death_is_told_from_an_exception() -> None:
    assert isinstance(death(DEAD), WorkerDiedError)
    assert death(BROKEN) is None
    followed = WorkerGroupError("env", "interact", {0: ChannelClosed("actions", "closed")}, 1)
    followed.__cause__ = DEAD
    assert isinstance(death(followed), WorkerDiedError)


def test_a_death_sends_the_run_back_to_its_checkpoint(record: RunRecord, events: list[Event]) -> None:
    begun: list[int] = []

    def attempt() -> str:
        begun.append(record.step)
        for step in range(record.step + 1, 4):
            record.step_finished(step, {"loss": float(step)})
            if step == 2 and len(begun) == 1:
                record.save(step, lambda path: (path / "weights").write_text("1"), weight_version=2, world_sizes={})
        if len(begun) == 1:
            raise DEAD
        return "done"

    assert with_recovery(attempt, record, RestartLimit()) == "done"
    assert begun == [0, 2]
    (restart,) = [message for message in events if isinstance(message, RunRestarted)]
    assert (restart.step, restart.restart, restart.max_restarts) == (2, 1, 3)
    assert restart.reason == "`rollout:0` on node 0 died"
    (bundle,), faults = read_bundles(record.folder.path)
    assert (bundle.content.what, faults) == ("`rollout:0` died in `generate`", [])
    assert restart.details == (
        "  why: it was killed, or exited without an exception",
        f"evidence: evidence/{bundle.path.name}",
    )
    assert [item.step for item in read_metrics(record.folder.metrics_file)] == [1, 2, 3]


def test_steps_stay_where_their_effect_is_stored_elsewhere(record: RunRecord) -> None:
    attempts: list[int] = []

    def attempt() -> int:
        attempts.append(record.step)
        record.started(None, {"actor": 1})
        record.keeps_steps = True
        if len(attempts) == 2:
            return record.step
        record.step_finished(1, {"loss": 1.0})
        record.step_finished(2, {"loss": 0.5})
        raise DEAD

    assert with_recovery(attempt, record, RestartLimit()) == 2
    assert attempts == [0, 2]


def test_an_exception_is_not_tried_again(record: RunRecord) -> None:
    calls: list[int] = []

    def attempt() -> None:
        calls.append(1)
        raise BROKEN

    with pytest.raises(WorkerGroupError) as failure:
        with_recovery(attempt, record, RestartLimit())
    assert failure.value is BROKEN
    assert len(calls) == 1


def test_there_is_an_end_of_restarts(record: RunRecord, events: list[Event]) -> None:
    calls: list[int] = []

    def attempt() -> None:
        calls.append(record.step)
        raise DEAD

    with pytest.raises(WorkerGroupError):
        with_recovery(attempt, record, RestartLimit(max=2))
    assert calls == [0, 0, 0]
    assert [message.restart for message in events if isinstance(message, RunRestarted)] == [1, 2]


def test_ray_that_does_not_start_again_is_tried_again(record: RunRecord, events: list[Event]) -> None:
    failures: list[Exception] = [DEAD, RayStartError("Ray does not start"), RayStartError("Ray does not start")]

    def attempt() -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    assert with_recovery(attempt, record, RestartLimit(max=3)) == "done"
    reasons = [message.reason for message in events if isinstance(message, RunRestarted)]
    assert reasons == ["`rollout:0` on node 0 died", "Ray does not start", "Ray does not start"]


def test_ray_that_does_not_start_at_first_ends_the_run(record: RunRecord, events: list[Event]) -> None:
    def attempt() -> None:
        raise RayStartError("Ray does not start")

    with pytest.raises(RayStartError):
        with_recovery(attempt, record, RestartLimit(max=3))
    assert events == []


def test_a_checkpoint_says_what_it_was_made_of(record: RunRecord) -> None:
    record.step_finished(1, {"loss": 0.5})
    record.save(1, lambda path: (path / "weights").write_text("1"), weight_version=7, world_sizes={"actor": 2})
    newest = record.folder.checkpoints.latest()
    assert newest is not None
    manifest: Manifest = newest.manifest
    assert (manifest.step, manifest.weight_version, dict(manifest.world_sizes)) == (1, 7, {"actor": 2})
    assert manifest.metrics["loss"] == 0.5


def test_a_job_is_launched_again_after_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, dict[str, str]]] = []
    output: list[Event] = []
    watched: dict[str, str] = {}

    class Machines:
        def __init__(self, *, cluster_cfg: ClusterConfig) -> None:
            self.config = cluster_cfg
            self.topology, self.changes = None, ()

        def has_returned(self) -> bool:
            return False

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            watched.clear()

        def record(
            self,
            folder: Path,
            *,
            log_names: dict[str, str],
            trace: bool,
            on_launch: Callable[[str, int, int], None],
            on_wait: Callable[[str, bool, str], None],
        ) -> None:
            watched.update(log_names)
            self.on_launch, self.on_wait = on_launch, on_wait

    def launch(config: Any, cluster: Any, record: RunRecord) -> Any:
        def init_workers() -> None:
            launched.append((record.step, dict(watched)))

        def run() -> None:
            record.step_finished(1, {})
            if len(launched) == 1:
                raise DEAD

        assert cluster.config is config.cluster
        cluster.on_launch("ActorGroup", 2, 0)
        return SimpleNamespace(init_workers=init_workers, run=run)

    def claim(cluster: Any, config: Any, components: object) -> None:
        cluster.on_wait("accelerator 0 of node 0: runs/a", False, "")

    monkeypatch.setattr(runners.run_program, "Cluster", Machines)
    monkeypatch.setattr(runners.run_program, "claim_components", claim)
    left: list[int] = []
    monkeypatch.setattr(runners.run_program.driver_job, "leave_claims", lambda cluster: left.append(len(launched)))
    job = load_job(
        "embodied/pick-laptop", [f"runner.logger.log_path={tmp_path}", "actor.group_name=ActorGroup"], environ={}
    )
    config: Any = job.config
    run_job(job, RunFolder.create(config.runner, "embodied"), output.append, launch)
    names = {"ActorGroup": "actor", config.rollout.group_name: "rollout", config.env.group_name: "env"}
    assert launched == [(0, names), (0, names)]
    waits = [message.what for message in output if isinstance(message, Waiting)]
    assert waits == ["the cluster", "accelerator 0 of node 0: runs/a", "actor: 2 processes"] * 2
    assert isinstance(output[-1], RunFinished)
    # What is held on other nodes is for the next attempt, and free where there is none.
    assert left == [1]
    launched.clear()
    once: Any = load_job(
        "embodied/pick-laptop", [f"runner.logger.log_path={tmp_path}", "runner.max_restarts=0"], environ={}
    )
    with pytest.raises(WorkerGroupError):
        run_job(once, RunFolder.create(once.config.runner, "embodied"), output.append, launch)
    assert left == [1]


def test_devices_of_components_without_processes_stay_free() -> None:
    topology = ClusterTopology.from_nodes([NodeInfo(0, 4, "NVIDIA")])
    components = {"actor": "0", "rollout": "1", "spare": "2"}
    config: Any = {"cluster": {"num_nodes": 1, "component_placement": components}}
    claimed: list[int | None] = []

    def claim(placements: Iterable[Placement]) -> None:
        claimed.extend(one.local_accelerator_rank for one in placements)

    cluster: Any = SimpleNamespace(topology=topology, claim=claim)
    run_program.claim_components(cluster, config, ["actor", "rollout", "reward"])
    assert claimed == [0, 1]
    run_program.claim_components(cluster, config)
    assert claimed == [0, 1, 0, 1, 2]


def test_others_hear_no_estimate_of_an_attempt_before(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one with the time of the first step, which may compile."""
    seen: list[tuple[object, object]] = []
    now = [0.0]

    def describe(*, step: object, left: object, **_: object) -> None:
        seen.append((step, left))

    monkeypatch.setattr(run_record.driver_job, "describe_claims", describe)
    monkeypatch.setattr(run_record.time, "monotonic", lambda: now[0])
    record.started(10, {"env": 1})
    for step, seconds in ((1, 100.0), (2, 2.0), (3, 4.0)):
        now[0] += seconds
        record.step_finished(step, {})
    record.go_back()
    record.started(10, {"env": 1})
    monkeypatch.undo()
    assert seen == [(None, None), (1, None), (2, 16.0), (3, 21.0), (None, None)]


def test_the_manager_is_named_and_not_a_worker_that_misses_it(
    record: RunRecord, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = RuntimeFailure("the job has ended", why="its manager is gone")
    misses = WorkerGroupError("rollout", "generate", {0: ended}, 1)
    lost = [WorkerDiedError("manager", node="this machine", cause="it was killed by SIGKILL")]
    monkeypatch.setattr(run_program, "Cluster", lambda **_: nullcontext(SimpleNamespace(topology=None)))
    monkeypatch.setattr(run_program, "fallen_watcher", lambda: lost.pop() if lost else None)
    monkeypatch.setattr(record, "watch", lambda *_: None)
    monkeypatch.setattr(run_program, "claim_components", lambda *_: None)
    config: Any = SimpleNamespace(cluster=SimpleNamespace(component_placement={}))

    def launch(*_: object) -> Any:
        if lost:
            raise misses
        return SimpleNamespace(init_workers=lambda: None, run=lambda: None)

    with_recovery(lambda: run_program._attempt(config, record, launch, None), record, RestartLimit())
    (restart,) = [event for event in events if isinstance(event, RunRestarted)]
    assert restart.reason == "`manager` on this machine died"


def test_nodes_that_are_back_cost_no_restart(record: RunRecord, events: list[Event]) -> None:
    begun: list[int] = []

    def attempt() -> str:
        begun.append(record.step)
        record.started(None, {"env": len(begun)})
        if len(begun) == 2:
            return "done"
        record.step_finished(1, {})
        record.save(1, lambda path: (path / "weights").write_text("1"), weight_version=1, world_sizes={}, snapshot=True)
        raise NodesReturned

    assert with_recovery(attempt, record, RestartLimit(max=0)) == "done"
    assert begun == [0, 1]
    assert not [event for event in events if isinstance(event, RunRestarted)]


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
    monkeypatch.setattr(run_record, "time", SimpleNamespace(monotonic=lambda: clock.now))
    run.started(1, {"actor": 1})
    clock.now += 3
    run.step_finished(1, {})
    clock.now += 2
    run.evaluated(1, {"eval/return": 1.0})
    clock.now += 60
    run.finished()
    (finished,) = [message for message in emitted if isinstance(message, run_events.RunFinished)]
    assert finished.seconds == 5.0


def test_the_state_says_where_the_cluster_is(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunFolder.open(run.folder.path).state.address == ""
    monkeypatch.setattr(engine, "current", lambda: engine.RayEngine("10.0.0.1:6379", embedded=False))
    cluster: Any = SimpleNamespace(record=lambda *_, **__: None, topology=None, changes=())
    run.watch(cast("Cluster", cluster), {})
    assert RunFolder.open(run.folder.path).state.address == "10.0.0.1:6379"


class Busy:
    """A call of processes that are in an endless method."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self._clock = clock

    def wait(self, timeout: float) -> list[Any]:
        self._clock.now += timeout
        raise CommunicationTimeoutError("call", timeout)


class Idle:
    """A call that is answered at once."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def wait(self, timeout: float) -> list[Any]:
        return [self._answer]


def group_of(peaks: object, calls: object) -> Any:
    return SimpleNamespace(memory_peaks=lambda: peaks, call_records=lambda: calls)


IDLE = group_of(Idle({"train": Peak(10, 5)}), Idle([CallRecord("train", 8, 1, 0.5, (0.5,))]))


def test_busy_components_are_waited_for_once(run: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.now))
    busy = group_of(Busy(clock), Busy(clock))
    run.keep_memory({"env": busy, "rollout": busy, "reward": busy, "actor": IDLE})
    assert clock.now == 102.0
    memory, profile = (json.loads(file.read_text()) for file in (run.folder.memory_file, run.folder.profile_file))
    assert [process["component"] for process in memory["processes"]] == ["actor"]
    assert [row["component"] for row in profile["rows"]] == ["actor"]


@pytest.mark.parametrize("damaged", ["memory_file", "profile_file"])
def test_memory_and_durations_are_written_each_for_itself(
    run: RunRecord, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(run.folder, damaged).mkdir()
    run.keep_memory({"actor": IDLE})
    assert "of the run's processes were not saved" in caplog.text
    other = {"memory_file": "profile_file", "profile_file": "memory_file"}[damaged]
    assert "actor" in getattr(run.folder, other).read_text()


def test_calls_of_an_earlier_run_are_not_those_of_this_one(tmp_path: Path) -> None:
    add_call("answer", 3, 0.1)
    folder = RunFolder.create(RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path))), "math")
    with RunRecord(folder, MetricsWriter(folder.metrics_file), lambda event: None) as record:
        add_call("answer", 5, 0.1)
        record.keep_memory({})
    rows = json.loads(folder.profile_file.read_text())["rows"]
    assert [(row["phase"], row["rows"]) for row in rows] == [("answer", 5)]


def test_changes_of_the_nodes_are_told_once(run: RunRecord, emitted: list[Event]) -> None:
    serves = NodeChange(1, "node 3, a spare, serves as node 1", "node 1 joined and was lost")
    without = NodeChange(2, "`env` goes on without node 2", "node 2 joined and was lost")
    for changes in ((), (serves,), (serves,), (serves, without), (without,), ()):
        cluster: Any = SimpleNamespace(record=lambda *_, **__: None, topology=None, changes=changes)
        run.watch(cast("Cluster", cluster), {})
    assert [event[1:] for event in emitted if isinstance(event, run_events.NodesChanged)] == [
        (serves.text, (serves.reason,)),
        (without.text, (without.reason,)),
        ("node 1 is back", ()),
        ("node 2 is back", ()),
    ]
