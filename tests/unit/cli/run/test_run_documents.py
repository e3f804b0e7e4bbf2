"""What a driver writes: its step, its end and the first failure; and where it runs."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_cli.cluster.node import node_requests
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.run import driver, run_documents
from rlinf_cli.run.run_documents import StateWriter, failure_block
from rlinf_cli.run.sweep import _environment as environment
from rlinf_core.config.sections.runner import LoggerConfig, RunnerConfig
from rlinf_core.errors import ChannelClosed, ClusterError, RunError, WorkerDiedError
from rlinf_core.failures import PackedError, WorkerGroupError
from rlinf_core.runners import events
from rlinf_core.runners.recovery import failures_of, reason_of
from rlinf_core.runners.storage.run_folder import RunFolder


def raised(error: Exception, where: str) -> Exception:
    """As it arrives from a worker."""
    try:
        raise error
    except Exception as caught:
        return PackedError.of(caught, where).unpack()


def group(name: str, failures: dict[int, Exception], **places: str) -> WorkerGroupError:
    error = WorkerGroupError(name, "generate", failures, 8)
    error.places = {int(rank[1:]): place for rank, place in places.items()}
    return error


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    file = tmp_path / "rollout" / "rank_1.log"
    file.parent.mkdir()
    file.write_text("".join(f"2026-01-01 10:00:00,{i:03} INFO [rollout:1] line {i}\n" for i in range(40)))
    return tmp_path


def test_the_first_failure_in_full(logs: Path) -> None:
    error = group(
        "rollout",
        {0: WorkerDiedError("rollout:1"), 1: raised(ValueError("bad action"), "rollout:1"), 2: ChannelClosed("a", "x")},
        r1="node 1 (10.0.0.2), pid 4711",
    )
    block = failure_block(error, logs, "runs/x")
    assert block.what == "`rollout:1` failed in `generate`: ValueError: bad action"
    assert block.where is not None
    assert block.where.startswith("node 1 (10.0.0.2), pid 4711; ")
    assert block.where.endswith(" in raised")
    assert block.why is not None
    first, *tail, last = block.why.splitlines()
    assert first == "last log lines"
    assert [line.split()[-1] for line in tail] == [str(i) for i in range(30, 40)]
    assert last == "because of it also failed: rollout:0 (WorkerDiedError), rollout:2 (ChannelClosed)"
    assert block.do is not None
    assert "`rlinf logs runs/x rollout:1` shows its log" in block.do


def test_a_group_is_told_with_its_component(logs: Path) -> None:
    error = group("RolloutGroup", {1: raised(ValueError("bad"), "RolloutGroup:1")}, r1="node 1 (10.0.0.2), pid 4711")
    block = failure_block(error, logs, "runs/x", {"RolloutGroup": "rollout"})
    assert block.what == "`RolloutGroup:1` failed in `generate`: ValueError: bad"
    assert (block.where or "").startswith("component `rollout`; node 1 (10.0.0.2), pid 4711; ")
    assert (block.why or "").startswith("last log lines\n")
    assert (block.do or "").startswith("`rlinf logs runs/x rollout:1`")
    # The same after a journey.
    twin = pickle.loads(pickle.dumps(error))
    assert failure_block(twin, logs, None)._replace(do=None) == failure_block(error, logs, None)._replace(do=None)


def test_roots_come_first_over_several_groups() -> None:
    error = ExceptionGroup(
        "run",
        [
            group("env", {0: ChannelClosed("actions", "closed")}),
            group("rollout", {1: raised(KeyError("k"), "rollout:1")}),
        ],
    )
    assert [failure.name for failure in failures_of(error)] == ["rollout:1", "env:0"]
    block = failure_block(error, None, None)
    assert block.what == "`rollout:1` failed in `generate`: KeyError: 'k'"
    assert block.why == "because of it also failed: env:0 (ChannelClosed)"


def test_the_cause_of_a_failure_comes_before_it() -> None:
    error = group("env", {0: ChannelClosed("actions", "closed")})
    error.__cause__ = group("rollout", {1: raised(KeyError("k"), "rollout:1")})
    assert [failure.name for failure in failures_of(error)] == ["rollout:1", "env:0"]
    # Those beside each other are not called consequences.
    error = group("actor", {rank: raised(ValueError("bad"), f"actor:{rank}") for rank in range(8)})
    beside = ", ".join(f"actor:{rank}" for rank in range(1, 7))
    assert failure_block(error, None, None).why == f"besides it also failed: {beside} (ValueError) and 1 more"


def test_a_death_is_told_by_its_own_words() -> None:
    death = WorkerDiedError("env:3", node="node 0 (127.0.0.1)", cause="killed by signal 9")
    block = failure_block(group("env", {3: death}, r3="node 0 (127.0.0.1), pid 7"), None, None)
    assert block.what == "`env:3` died in `generate`"
    assert block.where == "node 0 (127.0.0.1), pid 7"
    assert block.why == "killed by signal 9"


def test_the_driver_itself() -> None:
    try:
        raise KeyError("surprise")
    except KeyError as error:
        block = failure_block(error, None, None)
    assert block.what == "the driver failed: KeyError: 'surprise'"
    assert (block.where or "").endswith("in test_the_driver_itself")
    assert block.do == "`--verbose` shows the traceback"
    block = failure_block(ClusterError("no answer", where="10.0.0.1", why="no route", help="plug it in"), None, None)
    assert (block.what, block.where, block.why, block.do) == ("no answer", "10.0.0.1", "no route", "plug it in")


def test_a_message_of_many_lines_is_cut_and_the_reason_is_one() -> None:
    error = group("actor", {0: raised(RuntimeError("\n".join(f"line {i}" for i in range(50))), "actor:0")})
    block = failure_block(error, None, None)
    assert block.what.splitlines()[-1] == "... 38 more lines"
    assert reason_of(error) == "`actor:0` failed in `generate`: RuntimeError: line 0"
    error = WorkerGroupError("actor", "__init__", {0: raised(ImportError("no torch"), "actor:0")}, 1)
    assert reason_of(error) == "`actor:0` failed in its constructor: ImportError: no torch"


def test_unlisted_death_comes_first_of_its_consequences() -> None:
    """A channel's own process answers no call: those that use it tell of its death."""
    death = WorkerDiedError("trajectories:0", node="node 0", cause="it was killed by SIGKILL")
    error = group("rollout", {0: raised(death, "rollout:0"), 1: raised(death, "rollout:1")})
    first, *others = failures_of(error)
    assert (first.name, first.consequence) == ("trajectories:0", False)
    assert [(failure.name, failure.consequence) for failure in others] == [("rollout:0", True), ("rollout:1", True)]
    assert reason_of(error) == "`trajectories:0` on node 0 died"


class FullFolder:
    """A run folder that has no room for the first tries."""

    def __init__(self, full: int, number: int = errno.ENOSPC) -> None:
        self.full, self.number = full, number
        self.ended: list[tuple[str, str]] = []

    def update(self, *, step: int) -> None:
        assert step == 3

    def end(self, status: str, reason: str) -> None:
        if self.full:
            self.full -= 1
            raise RunError("the run folder cannot be written") from OSError(self.number, "")
        self.ended.append((status, reason))


def test_end_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_documents, "_ROOM_PAUSE", 0.0)
    folder: Any = FullFolder(2)
    assert run_documents.record_end(folder, 3, "failed", "why") is None
    assert folder.ended == [("failed", "why")]


@pytest.mark.parametrize(("number", "at_once"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_end_does_not_wait_in_vain(number: int, at_once: bool) -> None:
    folder: Any = FullFolder(2, number)
    assert isinstance(run_documents.record_end(folder, 3, "failed", at_once=at_once), RunError)
    assert (folder.full, folder.ended) == (1, [])


class Disk:
    """A run that is written to a disk of known speed, on a clock of ours."""

    def __init__(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now = 0.0
        self.seconds = 0.0
        self.writes = 0
        self.progress = RunProgress(lambda: self.now)
        self.view = StateWriter(self.progress, folder)
        update = folder.update

        def slow(**changes: Any) -> None:
            self.now += self.seconds
            self.writes += 1
            update(**changes)

        monkeypatch.setattr(folder, "update", slow)

    def tell(self, event: events.Event) -> int:
        """Return the step that the state has after `event`."""
        self.progress.take(event)
        self.view.show(event)
        return RunFolder.open(self.folder.path).state.step


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    runner = RunnerConfig(logger=LoggerConfig(log_path=str(tmp_path)))
    return Disk(RunFolder.create(runner, "fake"), monkeypatch)


def test_each_step_where_steps_are_slow_for_the_disk(disk: Disk) -> None:
    disk.seconds = 0.002
    for step in range(1, 20):
        disk.now += 0.15
        assert disk.tell(events.StepFinished(step, {})) == step


def test_slow_disk_bounds_cost_and_delay_of_records(disk: Disk) -> None:
    disk.seconds = 0.01
    for step in range(1, 1001):
        disk.now += 0.01
        assert step - disk.tell(events.StepFinished(step, {})) <= 50
    assert disk.writes * disk.seconds <= 0.022 * disk.now
    disk.seconds = 5.0
    disk.now += 10
    assert disk.tell(events.StepFinished(1001, {})) == 1001
    disk.now += 2
    assert disk.tell(events.StepFinished(1002, {})) == 1002


def test_what_lasts_is_written_at_once(disk: Disk) -> None:
    disk.seconds = 1.0
    disk.tell(events.StepFinished(1, {}))
    assert disk.tell(events.StepFinished(2, {})) == 1
    assert disk.tell(events.CheckpointSaved(2, disk.folder.path)) == 2
    disk.tell(events.StepFinished(3, {}))
    assert disk.tell(events.RunRestarted(2, 1, 3, "rollout:0 died")) == 2
    disk.tell(events.StepFinished(3, {}))
    assert disk.tell(events.RunFinished(3, {}, 1.0)) == 3


def test_full_disk_ends_no_run(disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    update = disk.folder.update

    def full(**changes: Any) -> None:
        raise RunError("the run folder cannot be written", where="runs/x", why="No space left on device")

    monkeypatch.setattr(disk.folder, "update", full)
    disk.tell(events.CheckpointSaved(2, disk.folder.path))
    assert disk.tell(events.RunRestarted(2, 1, 3, "rollout:0 died")) == 0
    assert [line for line in caplog.messages if "No space left" in line] == [
        "the current step cannot be written to runs/x: No space left on device"
    ]

    monkeypatch.setattr(disk.folder, "update", update)
    disk.now += 3
    assert disk.tell(events.StepFinished(3, {})) == 3


@pytest.mark.parametrize("claims", ["wait", "no-wait", "share"])
def test_a_point_of_a_sweep_is_of_its_group_on_the_head(
    claims: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Mapping[str, str]] = []

    def run(*_: object, env: Mapping[str, str], **__: object) -> int:
        sent.append(env)
        return 0

    monkeypatch.setattr(node_requests, "run_on_head", run)
    monkeypatch.setattr(driver, "resolved_text", repr)
    record: Any = SimpleNamespace(nodes=[SimpleNamespace(host="head")])
    job: Any = SimpleNamespace(cluster=SimpleNamespace(forward_env=()), tree=None)
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        monkeypatch.setenv("RLINF_CLAIMS", claims)
        monkeypatch.setenv("RLINF_CLAIMS", environment(folder, 2, waits=True)["RLINF_CLAIMS"])
        driver.train_there(record, job, detached=False)
    first, second, another = (env["RLINF_CLAIMS"] for env in sent)
    if claims == "wait":
        assert first == second != another
        assert first.startswith("group:")
    else:
        assert {first, second, another} == {claims}
    monkeypatch.setenv("RLINF_CLAIMS", "wait")
    assert environment(tmp_path, 1, waits=False)["RLINF_CLAIMS"] == "no-wait"
