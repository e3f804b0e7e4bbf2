"""A run as Python opens it, the trace of its steps, and runs without a command."""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlinf_core import load_run
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import ConfigError, RunError, WorkerDiedError
from rlinf_core.job.load import load_job
from rlinf_core.process import activity
from rlinf_core.process.activity import Taken, TraceSpan
from rlinf_core.runners import events
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.standalone import StandaloneRecord
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.trace import TraceWriter


def small_run(tmp_path: Path, name: str = "small", steps: int = 3, *, evaluated: bool = True) -> RunFolder:
    runner = RunnerConfig.model_validate({"logger": {"experiment_name": name, "log_path": str(tmp_path / "runs")}})
    run = RunFolder.create(runner, "embodied")
    run.write_config_text("recipe: embodied\nactor: {optim: {lr: 1.0e-3}, seed: 7}\nnames: [a, b]\n")
    run_events.append_event(run.path, run_events.STARTED, 0, "started with actor 1")
    with MetricsWriter(run.metrics_file) as writer:
        for step in range(1, steps + 1):
            writer.log(step, {"env/return": step / 2, "train/actor/grad_norm": math.nan})
        if evaluated:
            writer.log(steps, {"eval/return": 9.0, "eval/episodes": 4.0})
    run.checkpoints.begin(steps)
    run.checkpoints.commit(steps, Manifest(step=steps))
    run.update(step=steps)
    return run


def test_run_has_its_parts(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    folder.end("finished")
    run = load_run(str(folder.path))
    assert run.path == folder.path
    assert run.config == {"recipe": "embodied", "actor": {"optim": {"lr": 1e-3}, "seed": 7}, "names": ["a", "b"]}
    assert [record["step"] for record in run.metrics] == [1, 2, 3]
    assert [record["env/return"] for record in run.metrics] == [0.5, 1.0, 1.5]
    assert math.isnan(run.metrics[0]["train/actor/grad_norm"])
    assert all(abs(record["time"] - folder.state.created) < 1e6 for record in run.metrics)
    assert run.result == {"eval/return": 9.0, "eval/episodes": 4.0}
    assert [(event.kind, event.text) for event in run.events] == [("started", "started with actor 1")]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [3]
    assert (run.status, run.reason, run.step, run.recipe) == ("finished", "", 3, "embodied")
    assert run.faults == []


def test_result_without_evaluation_is_the_last_step(tmp_path: Path) -> None:
    assert load_run(small_run(tmp_path, evaluated=False).path).result["env/return"] == 1.5


def test_run_that_goes_on_is_read_again_by_opening_it(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    run = load_run(folder.path)
    assert run.status == "running"
    before = list(run.metrics)
    with MetricsWriter(folder.metrics_file) as writer:
        writer.log(4, {"env/return": 5.0})
    assert run.metrics == before
    assert load_run(folder.path).metrics[-1]["env/return"] == 5.0


def test_metric_of_the_name_of_a_column_does_not_replace_it(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    line = {"step": 5, "time": 1773482102.5, "metrics": {"step": -1.0, "time": -1.0, "x": 2.0}}
    with folder.metrics_file.open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert load_run(folder.path).metrics[-1] == {"step": 5, "time": 1773482102.5, "x": 2.0}


def test_skipped_lines_are_named(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    with folder.metrics_file.open("a") as file:
        file.write('{"step": "4"}\n{"step": 4, "ti')
    with (folder.path / run_events.EVENTS).open("a") as file:
        file.write("[]\n")
    run = load_run(folder.path)
    assert [record["step"] for record in run.metrics] == [1, 2, 3]
    first, second = run.faults
    assert first.startswith("line 4 of metrics.jsonl was skipped")
    assert second.startswith("line 2 of events.jsonl was skipped")


def test_folder_without_a_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunError) as missing:
        load_run(tmp_path / "runs" / "nothing")
    assert missing.value.message == "this is not a run folder"
    first, second = small_run(tmp_path, "first"), small_run(tmp_path, "second")
    with pytest.raises(RunError) as of_runs:
        load_run(tmp_path / "runs")
    assert of_runs.value.message == "this folder is not a run"
    assert of_runs.value.help == f"name one of its runs, such as {first.path} or {second.path}"
    with pytest.raises(RunError) as empty:
        load_run(first.checkpoints.folder)
    assert empty.value.help == "name a run folder"


@pytest.mark.parametrize(
    ("file", "part", "message"),
    [
        ("config.yaml", "config", "the configuration of a run cannot be read"),
        ("metrics.jsonl", "metrics", "the metrics of a run cannot be read"),
    ],
)
def test_part_that_is_a_pipe_is_one_clear_error(file: str, part: str, message: str, tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    (folder.path / file).unlink()
    os.mkfifo(folder.path / file)
    run = load_run(folder.path)
    with pytest.raises(RunError) as raised:
        getattr(run, part)
    assert (raised.value.message, raised.value.where) == (message, str(folder.path / file))
    assert run.recipe == "embodied"


@pytest.mark.security
def test_nothing_of_a_received_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_run(tmp_path)
    for name in ("evil.py", "sitecustomize.py"):
        (folder.path / name).write_text("raise SystemExit('executed')\n")
    folder.config_file.write_text("recipe: evil:recipe\nx: !!python/object/apply:os.abort []\n")
    monkeypatch.chdir(folder.path)
    monkeypatch.syspath_prepend(folder.path)
    run = load_run(".")
    assert run.metrics
    with pytest.raises(RunError, match="the configuration of a run cannot be read"):
        _ = run.config
    folder.config_file.write_text("recipe: evil:recipe\n")
    assert load_run(".").config == {"recipe": "evil:recipe"}


@pytest.mark.security
def test_shown_run_has_nothing_that_a_terminal_acts_on(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    state = json.loads((folder.path / "run.json").read_text())
    evil = "\x1b]0;title\x07two\nlines" + "x" * 4000
    (folder.path / "run.json").write_text(
        json.dumps({**state, "status": "failed", "reason": evil, "recipe": "a\x1b[2J\nb"})
    )
    text = repr(load_run(folder.path))
    assert text.startswith(
        f"<Run {folder.path.name}: recipe a\\x1b[2J b, failed at step 3: \\x1b]0;title\\x07two lines"
    )
    assert text.isprintable()
    assert len(text) < 400


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"status": "finished"}, "finished at step 3"),
        ({"status": "failed", "reason": "`env:1` died"}, "failed at step 3: `env:1` died"),
        ({"status": "interrupted"}, "interrupted at step 3"),
    ],
)
def test_run_shows_its_end(changes: dict[str, Any], shown: str, tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    folder.end(**changes)
    assert repr(load_run(folder.path)) == f"<Run {folder.path.name}: recipe embodied, {shown}>"


def test_folder_and_checkpoint_show_their_paths(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    assert repr(folder) == f"RunFolder({str(folder.path)!r})"
    (checkpoint,) = load_run(folder.path).checkpoints
    assert repr(checkpoint) == f"<checkpoint of step 3: {folder.path}/checkpoints/global_step_3>"


def config_of(
    tmp_path: Path, *overrides: str, name: str = "embodied/pick-laptop", environ: dict[str, str] | None = None
) -> Any:
    log_path = f"runner.logger.log_path={tmp_path / 'runs'}"
    return load_job(name, (log_path, *overrides), environ=environ or {}).config


@pytest.mark.parametrize("name", ["embodied/pick-laptop", "hetero18", "embodied/libero-collocated-8gpu"])
def test_the_configuration_it_keeps_loads_to_the_same_one(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, "recipe=embodied", name=name)
    with StandaloneRecord.create(config) as record:
        kept = load_job(str(record.folder.config_file), environ={}).config
    assert kept is not None
    assert kept.model_dump() == config.model_dump()


def test_it_needs_the_configuration_of_a_job(tmp_path: Path) -> None:
    plain: Any = config_of(tmp_path).model_dump()
    with pytest.raises(ConfigError, match="a `dict` is not the configuration of a job"):
        StandaloneRecord.create(plain)


def test_it_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "hunter2hunter2")
    config = config_of(tmp_path, "runner.logger.project_name=hunter2hunter2")
    with StandaloneRecord.create(config) as record:
        text = record.folder.config_file.read_text()
    assert "hunter2" not in text
    assert "recipe: embodied" in text


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (None, "finished", ""),
        (ValueError("camera unplugged"), "failed", "ValueError: camera unplugged"),
        (ValueError("no file \udcff"), "failed", "ValueError: no file \\udcff"),
        (KeyboardInterrupt(), "interrupted", "interrupted"),
    ],
)
def test_its_folder_says_how_the_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException | None, status: str, reason: str
) -> None:
    record = StandaloneRecord.create(config_of(tmp_path))
    record.step_finished(1, {"env/return": 1.0})
    record.close(error)
    record.close(RuntimeError("the first end counts"))
    state = record.folder.refresh()
    assert (state.status, state.reason, state.step) == (status, reason, 1)
    assert ("finished after step 1" in capsys.readouterr().err) == (status == "finished")


class Failing(Runner):
    def train_step(self, step: int) -> dict[str, float]:
        raise ValueError("camera unplugged")

    def write_checkpoint(self, folder: Path) -> None: ...
    def read_checkpoint(self, folder: Path) -> None: ...


def test_loop_that_is_shut_down_after_a_failure_has_failed(tmp_path: Path) -> None:
    def train() -> None:
        with ExitStack() as ends:
            ends.callback(loop.shutdown)
            loop.train()

    loop = Failing(config_of(tmp_path), {})
    with pytest.raises(ValueError, match="unplugged"):
        train()
    state = loop.record.folder.state
    assert (state.status, state.reason) == ("failed", "ValueError: camera unplugged")
    with pytest.raises(RunError, match="the run has ended, and records no more metrics"):
        loop.record.step_finished(1, {"env/return": 1.0})


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
        return [Taken([TraceSpan(activity.METHOD, f"answer {self.asked}", 1.0, 0.5, 7)], 1)]


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
                    TraceSpan(activity.TIMER, "inner", 100.5, 0.25, 11),
                    TraceSpan(activity.METHOD, "run_training", 100.0, 1.0, 11),
                    TraceSpan(activity.TRANSFER, "send to env:0", 100.0, 0.5, 12),
                ],
                0,
            ),
        )
        writer.add("env:0", Taken([TraceSpan(activity.WAIT, "recv from actor:0", 100.0, 0.5, 11)], 2))
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
        writer.add("env:0", Taken([TraceSpan(activity.TIMER, "t", 0.0, 1.0, 1)] * 50, 0))
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


def test_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file.fileno())
    os.close(full)
    for _ in range(3):
        writer.add("env:0", Taken([TraceSpan(activity.TIMER, "t", 0.0, 1.0, 1)] * 1000, 0))
        writer.collect([Group("env")])
    writer.close()
    writer.close()
    assert caplog.text.count("the trace is incomplete") == 1
    assert "No space left on device" in caplog.text


def test_it_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="trace cannot be written"):
        TraceWriter(tmp_path / "missing" / "trace.json")
