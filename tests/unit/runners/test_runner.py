"""The loop that every recipe runs: phases, profiled steps, and what holds it up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlinf_core.config.sections.runner import LoggerConfig, ProfilerConfig, RestartLimit, RunnerConfig
from rlinf_core.errors import CheckpointError, ConfigError, RLinfError, RuntimeFailure
from rlinf_core.runners import events, runner, step_clock
from rlinf_core.runners.events import Event, ItemFate, ItemFates, item_fates
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import NodesReturned, Restarts
from rlinf_core.runners.runner import ProfiledSteps, Runner, mean_over_ranks
from rlinf_core.runners.step_clock import HangWatch, OnHang, StepClock, Stopwatch
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.supervision.job_view import Standing


class Counting(Runner):
    """A loop that counts its steps."""

    def train_step(self, step: int) -> dict[str, float]:
        with self.phase(step, events.ACTOR_TRAINING):
            pass
        return {"train/loss": 1 / step}

    def evaluate_policy(self, step: int) -> dict[str, float]:
        return {"eval/return": float(step)}

    def write_checkpoint(self, folder: Path) -> None:
        (folder / "count").write_text(str(self.weight_version))

    def read_checkpoint(self, folder: Path) -> None:
        self.weight_version = int((folder / "count").read_text())


class Told(list[Event]):
    def of(self, kind: type[Any]) -> list[int]:
        return [event.step for event in self if isinstance(event, kind)]


def made(tmp_path: Path, messages: Told, **keys: Any) -> tuple[Counting, RunFolder]:
    """Return a loop with a record in a run folder."""
    runner = RunnerConfig(**keys, logger=LoggerConfig(log_path=str(tmp_path)))
    folder = RunFolder.create(runner, "counting")
    record = RunRecord(folder, MetricsWriter(folder.metrics_file), messages.append)
    return Counting(cast("Any", SimpleNamespace(runner=runner, recipe="counting")), {}, record), folder


@pytest.mark.parametrize(
    ("keys", "evaluated", "saved"),
    [
        ({}, [0, 2, 4, 5], [3, 5]),
        ({"val_before_train": False}, [2, 4, 5], [3, 5]),
        ({"val_check_interval": -1}, [], [3, 5]),
        ({"save_interval": -1}, [0, 2, 4, 5], []),
        ({"only_eval": True}, [0], []),
    ],
)
def test_what_is_evaluated_and_kept(
    tmp_path: Path, keys: dict[str, Any], evaluated: list[int], saved: list[int]
) -> None:
    output = Told()
    loop, _ = made(tmp_path, output, **{"max_steps": 5, "val_check_interval": 2, "save_interval": 3, **keys})
    loop.init_workers()
    loop.run()
    assert output.of(events.Evaluated) == evaluated
    assert output.of(events.CheckpointSaved) == saved
    assert output.of(events.StepFinished) == ([] if keys.get("only_eval") else [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("keys", "snapshots"),
    [({}, [1, 2, 4]), ({"snapshot_interval": None}, []), ({"save_interval": -1}, []), ({"save_interval": 1}, [])],
)
def test_snapshots_lie_between_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], snapshots: list[int]
) -> None:
    monkeypatch.setattr("rlinf_core.runners.recovery._REST", 0.0)
    output = Told()
    loop, folder = made(
        tmp_path, output, **{"max_steps": 5, "save_interval": 3, "snapshot_interval": "0.000001s", **keys}
    )
    loop.init_workers()
    loop.run()
    saved = [event for event in output if isinstance(event, events.CheckpointSaved)]
    assert [event.step for event in saved if event.snapshot] == snapshots
    assert not any(checkpoint.manifest.snapshot for checkpoint in folder.checkpoints.complete())


def test_snapshot_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = Told()
    loop, _ = made(tmp_path, output, max_steps=4, save_interval=4, snapshot_interval="0.000001s")
    monkeypatch.setattr(loop, "write_checkpoint", full_disk_until(loop, 4))
    loop.init_workers()
    loop.run()
    assert output.of(events.CheckpointSaved) == [4]
    assert [record.message for record in caplog.records if "no snapshots are saved" in record.message] != []


def full_disk_until(loop: Counting, step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if loop.record.step < step:
            raise CheckpointError("a checkpoint cannot be written", why="No space left on device")
        (folder / "count").write_text("1")

    return write


def test_workers_are_prepared_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = made(tmp_path, Told(), max_steps=1)
    monkeypatch.setattr(Counting, "start_workers", lambda _: None)
    with pytest.raises(RuntimeFailure, match="the workers are not prepared"):
        loop.run()


def test_a_step_has_the_times_of_its_phases(tmp_path: Path) -> None:
    loop, folder = made(tmp_path, Told(), max_steps=1)
    loop.init_workers()
    loop.run()
    (line,) = [record for record in read_metrics(folder.metrics_file) if record.step]
    assert {"train/loss", "eval/return", "time/step", "time/actor_training", "time/evaluate"} <= line.metrics.keys()


def test_times_of_a_phase_that_recurs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, folder = made(tmp_path, Told(), max_steps=1)
    call = SimpleNamespace(consume_durations=lambda: {"learn": 2.0})

    def train_step(step: int) -> dict[str, float]:
        for _ in range(3):
            with loop.phase(step, "walk"):
                loop.add_durations(cast("Any", call))
        return {}

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=iter(range(100)).__next__))
    loop.train(1)
    (line,) = read_metrics(folder.metrics_file)
    assert line.metrics == {"time/walk": 3, "time/learn": 6, "time/step": 7}


@pytest.mark.parametrize(
    "ranks", [[{"loss": 1.0}, {"loss": 3.0, "kl": 5.0}], [{"loss": 1.0, "kl": 5.0}, {"loss": 3.0}]]
)
def test_a_metric_of_some_ranks_is_their_mean(ranks: list[dict[str, float]]) -> None:
    assert mean_over_ranks(ranks) == {"loss": 2, "kl": 5}


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), True, 3])
def test_numbers_of_other_libraries_are_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any) -> None:
    loop, folder = made(tmp_path, output := Told(), max_steps=1)
    monkeypatch.setattr(loop, "train_step", lambda step: {"a": number})
    monkeypatch.setattr(loop, "evaluate_policy", lambda step: {"eval/b": number})
    loop.init_workers()
    loop.run()
    assert all(type(value) is float for event in output for value in getattr(event, "metrics", {}).values())
    (checkpoint,) = folder.checkpoints.complete()
    assert checkpoint.manifest.metrics["a"] == float(number)


def test_a_metric_named_after_any_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, folder = made(tmp_path, Told(), max_steps=1)
    monkeypatch.setattr(loop, "train_step", lambda step: {"val/m\udce4n": 1.0})
    loop.init_workers()
    loop.run()
    assert read_metrics(folder.metrics_file)[-1].metrics["val/m\\udce4n"] == 1
    (checkpoint,) = folder.checkpoints.complete()
    assert checkpoint.manifest.metrics["val/m\\udce4n"] == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (None, "returned no metrics but None"),
        ({"a": 1.0, "step": 3}, "returned a metric `step`, which is the name of a number that each step has"),
        ({"time/step": 3.0}, "returned a metric `time/step`, which is the name of a number that each step has"),
        ([("a", 1.0)], "returned no metrics but [('a', 1.0)]"),
        ({"a": 1.0, "b": None}, "returned None as metric 'b', which is not a number"),
        ({"a": "3"}, "returned '3' as metric 'a', which is not a number"),
        ({"a": torch.ones(2)}, "returned tensor([1., 1.]) as metric 'a', which is not a number"),
        ({"a": 1j}, "returned 1j as metric 'a', which is not a number"),
        ({1: 1.0}, "returned 1.0 as metric 1, which is not a number"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: Any, message: str
) -> None:
    loop, folder = made(tmp_path, Told(), max_steps=1)
    monkeypatch.setattr(loop, "train_step", lambda step: metrics)
    loop.init_workers()
    with pytest.raises(RLinfError) as raised:
        loop.train()
    assert f"`Counting.train_step` {message}" in str(raised.value)
    assert read_metrics(folder.metrics_file) == []


class Ahead(Counting):
    """A loop with a rollout under way at each checkpoint."""

    def items_in_flight(self) -> ItemFates:
        return item_fates([(ItemFate.AGAIN, f"rollout of step {self.weight_version + 1}")])


def test_items_in_flight_are_told_when_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    output = Told()
    loop, folder = made(tmp_path, output, max_steps=2, save_interval=1, val_check_interval=-1)
    loop.__class__ = Ahead
    loop.init_workers()
    loop.run()
    newest = folder.checkpoints.latest()
    assert newest is not None
    assert newest.manifest.in_flight == {"done again": ["rollout of step 3"]}
    assert output.of(events.ItemsResumed) == []

    loop.record.go_back()
    loop.init_workers()
    assert output[-1] == events.ItemsResumed(2, {"done again": ["rollout of step 3"]})


def test_a_resumed_loop_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    loop, folder = made(tmp_path, Told(), max_steps=3, save_interval=3)
    loop.init_workers()
    loop.run()
    folder.end("finished")
    output = Told()
    again, same = made(tmp_path, output, max_steps=5, resume_dir="auto")
    again.init_workers()
    assert (same.path, again.weight_version, again.next_step) == (folder.path, 3, 4)
    again.run()
    assert output.of(events.StepFinished) == [4, 5]
    assert 0 not in output.of(events.Evaluated)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupted_loop_keeps_the_step_that_is_done(tmp_path: Path, end: type[BaseException], kept: bool) -> None:
    output = Told()
    loop, _ = made(tmp_path, output, max_steps=5, val_check_interval=-1, save_on_interrupt=kept)
    loop.init_workers()
    take = output.append

    def interrupt(event: Event) -> None:
        take(event)
        if isinstance(event, events.StepFinished) and event.step == 2:
            raise end

    loop.record.emit = interrupt
    with pytest.raises(end):
        loop.run()

    assert output.of(events.StepFinished) == [1, 2]
    assert output.of(events.CheckpointSaved) == ([2] if kept else [])


def test_group_with_a_failed_call_keeps_no_other_group_running(tmp_path: Path) -> None:
    ended: list[str] = []

    class Group:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self._name, self._error = name, error

        def shutdown(self) -> None:
            ended.append(self._name)
            if self._error is not None:
                raise self._error

    loop, _ = made(tmp_path, Told())
    loop.groups = cast("Any", {"actor": Group("actor"), "rollout": Group("rollout", ValueError("unseen"))})

    with pytest.raises(ValueError, match="unseen"):
        loop.shutdown()

    assert ended == ["rollout", "actor"]


@pytest.mark.parametrize(("save_interval", "steps"), [(3, [1, 2]), (2, [1, 2]), (-1, [1, 2, 3, 4, 5])])
def test_nodes_that_are_back_are_taken_after_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_interval: int, steps: list[int]
) -> None:
    output = Told()
    loop, folder = made(tmp_path, output, max_steps=5, save_interval=save_interval)
    monkeypatch.setattr(RunRecord, "nodes_returned", property(lambda record: record.step >= 2))
    keeps = save_interval != -1
    with pytest.raises(NodesReturned) if keeps else nullcontext():
        loop.run()
    assert output.of(events.StepFinished) == steps
    newest = folder.checkpoints.latest_sound()
    # Training goes on from that very step.
    assert (None if newest is None else newest.step) == (2 if keeps else None)


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


class Group:
    """A group that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def start_profile(self, kind: str, folder: str, name: str) -> str:
        self.asked.append(("start", kind, folder, name))
        return name

    def stop_profile(self) -> str:
        self.asked.append(("stop",))
        return ""


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def done(*handles: Any) -> None:
        assert all(isinstance(handle, str) for handle in handles)

    monkeypatch.setattr(runner, "wait_together", done)


def run(config: ProfilerConfig | None, steps: range, last: int) -> dict[str, list[tuple[int, str]]]:
    """Return when each group was asked for what."""
    groups = {"actor": Group(), "env": Group()}
    seen: dict[str, list[tuple[int, str]]] = {name: [] for name in groups}
    profiles = ProfiledSteps(config, Path("profiles"), groups)
    for step in steps:
        profiles.begin(step)
        profiles.end(step, last=step == last)
        for name, group in groups.items():
            seen[name] += [(step, one[0]) for one in group.asked]
            group.asked.clear()
    return seen


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(
    ("config", "steps", "asked"),
    [
        (None, range(1, 5), []),
        (ProfilerConfig(), range(1, 5), [(2, "start"), (2, "stop")]),
        (ProfilerConfig(first_step=2, last_step=3), range(1, 5), [(2, "start"), (3, "stop")]),
        (ProfilerConfig(first_step=2, last_step=9), range(1, 5), [(2, "start"), (4, "stop")]),
        # Resumed in the midst of them, and after them.
        (ProfilerConfig(first_step=1, last_step=3), range(3, 5), [(3, "start"), (3, "stop")]),
        (ProfilerConfig(first_step=1, last_step=2), range(3, 5), []),
    ],
)
def test_profile_covers_its_steps(config: ProfilerConfig | None, steps: range, asked: list[tuple[int, str]]) -> None:
    assert run(config, steps, 4) == {"actor": asked, "env": asked}


@pytest.mark.usefixtures("_no_waits")
def test_unknown_component_is_refused() -> None:
    with pytest.raises(ConfigError, match="names `reward`"):
        run(ProfilerConfig(components=("reward",)), range(1, 2), 4)


@pytest.mark.usefixtures("_no_waits")
def test_profile_of_a_component_leaves_the_others_alone() -> None:
    seen = run(ProfilerConfig(components=("env",)), range(1, 5), 4)
    assert seen == {"actor": [], "env": [(2, "start"), (2, "stop")]}


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    watch = Stopwatch()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    times = watch.times()
    assert times["began"] == now
    assert 0 <= times["seconds"] < 3600
