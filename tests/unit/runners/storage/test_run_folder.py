"""Run folders: made, found, continued; what they say of a run, also when its process could not say it any more."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.job.load import load_job
from rlinf_core.runners import events
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage import durable, run_folder
from rlinf_core.runners.storage.checkpoint import Manifest, config_hash
from rlinf_core.runners.storage.resuming import find_source
from rlinf_core.runners.storage.run_folder import RunFolder, unused_path


def settings(path: Path, **fields: Any) -> RunnerConfig:
    experiment = fields.pop("experiment_name", None)
    return RunnerConfig.model_validate(
        {**fields, "logger": {"log_path": str(path / "runs"), "experiment_name": experiment}}
    )


def save(folder: RunFolder, *steps: int) -> None:
    with MetricsWriter(folder.metrics_file) as writer:
        for step in steps:
            writer.log(step, {"env/return": step})
            folder.checkpoints.begin(step)
            folder.checkpoints.commit(step, Manifest(step=step))


def test_a_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = (RunFolder.create(settings(tmp_path), "embodied") for _ in range(2))
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs"
    assert first.path.name.startswith("embodied-")
    assert first.resumed_from is None
    data = json.loads((first.path / "run.json").read_text())
    assert data["schema"] == "rlinf.run/1"
    assert (data["status"], data["pid"], data["recipe"], data["step"]) == ("running", os.getpid(), "embodied", 0)
    assert first.log_file("actor", 1) == first.path / "logs" / "actor" / "rank_1.log"
    assert RunFolder.open(first.path).state == first.state


def test_two_runs_of_one_second_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260314-101502")
    names = [RunFolder.create(settings(tmp_path), "math").path.name for _ in range(3)]
    assert names == ["math-20260314-101502", "math-20260314-101502-2", "math-20260314-101502-3"]


@pytest.mark.parametrize(
    ("name", "start"), [("a/b", "a_b-"), ("../x y", "_x_y-"), ("...", "run-"), ("策略", "策略-"), ("pick-2", "pick-2-")]
)
def test_an_experiment_may_have_any_name(tmp_path: Path, name: str, start: str) -> None:
    folder = RunFolder.create(settings(tmp_path, experiment_name=name), "embodied")
    assert folder.path.name.startswith(start)
    assert folder.path.parent == tmp_path / "runs"
    assert RunFolder.open(folder.path).state.experiment == name


def test_how_it_ended(tmp_path: Path) -> None:
    folder = RunFolder.create(settings(tmp_path), "embodied")
    folder.update(step=7, address="10.0.0.1:6379")
    assert RunFolder.open(folder.path).state.outcome == ("running", "")
    folder.end("failed", "`actor:0` died\n  why: memory")
    state = RunFolder.open(folder.path).state
    assert state.outcome == ("failed", "`actor:0` died")
    assert (state.step, state.address) == (7, "10.0.0.1:6379")
    assert state.ended is not None


def test_a_run_that_was_killed_is_known_by_its_process(tmp_path: Path) -> None:
    folder = RunFolder.create(settings(tmp_path), "embodied")
    folder.update(start=f"{os.getpid()}:1")
    status, reason = RunFolder.open(folder.path).state.outcome
    assert status == "failed"
    assert "killed" in reason
    # Of another machine's process nothing can be known here.
    folder.update(host="elsewhere", boot="00000000-0000-0000-0000-000000000000")
    status, reason = RunFolder.open(folder.path).state.outcome
    assert (status, "not visible from here" in reason) == ("unknown", True)


def test_the_latest(tmp_path: Path) -> None:
    log_path = tmp_path / "runs"
    assert RunFolder.latest(log_path) is None
    pick = RunFolder.create(settings(tmp_path, experiment_name="pick"), "embodied")
    reach = RunFolder.create(settings(tmp_path, experiment_name="reach"), "embodied")
    (log_path / "notes").mkdir()
    (log_path / "broken").mkdir()
    (log_path / "broken" / "run.json").write_text("{")
    for experiment, wanted in ((None, reach), ("pick", pick), ("reach", reach)):
        result = RunFolder.latest(log_path, experiment)
        assert result is not None
        assert result.path == wanted.path
    assert RunFolder.latest(log_path, "push") is None


def test_auto_goes_on_in_the_folder_of_the_newest_checkpoint(tmp_path: Path) -> None:
    auto = settings(tmp_path, resume_dir="auto")
    first = RunFolder.create(auto, "embodied")
    assert first.resumed_from is None
    save(first, 5, 10)
    first.checkpoints.begin(15)
    first.end("failed")
    other = RunFolder.create(settings(tmp_path, experiment_name="other"), "embodied")
    save(other, 20)
    other.end("finished")
    again = RunFolder.create(auto, "embodied")
    assert again.path == first.path
    assert again.resumed_from == first.path / "checkpoints" / "global_step_10"
    assert (again.state.status, again.state.step, again.state.ended) == ("running", 10, None)
    assert again.state.created == first.state.created


def test_auto_begins_anew_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    first.checkpoints.begin(5)
    first.end("failed")
    second = RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied")
    assert second.path != first.path
    assert second.resumed_from is None


def test_a_run_that_goes_on_is_not_taken_over(tmp_path: Path) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    save(first, 5)
    with pytest.raises(RunError, match="still active") as raised:
        RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied")
    assert str(os.getpid()) in str(raised.value)
    first.update(start=f"{os.getpid()}:1")
    assert RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied").path == first.path


def test_one_of_two_simultaneous_commands_resumes_a_run(tmp_path: Path) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    save(first, 5)
    first.end("failed")
    before = first.refresh()
    with durable.claimed(first.path / "run.json") as ours:
        assert ours
        with pytest.raises(RunError, match="still active") as raised:
            RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied")
    assert "another command is resuming it" in str(raised.value)
    assert first.refresh() == before
    again = RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied")
    assert (again.path, again.state.alive) == (first.path, True)


def test_a_run_that_was_taken_over_meanwhile_is_not_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    save(first, 5)
    first.end("failed")
    claimed = durable.claimed

    def later(path: Path, flags: int) -> Any:
        # Between finding the run and claiming it, another command has claimed it and let go.
        monkeypatch.setattr(durable, "claimed", claimed)
        RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied")
        return claimed(path, flags)

    monkeypatch.setattr(durable, "claimed", later)
    with pytest.raises(RunError, match="still active"):
        RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied")


def test_a_file_system_without_locks_claims_for_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(durable.fcntl, "flock", refuse)
    first = RunFolder.create(settings(tmp_path), "embodied")
    save(first, 5)
    first.end("failed")
    assert RunFolder.create(settings(tmp_path, resume_dir="auto"), "embodied").path == first.path


def test_an_older_checkpoint_begins_a_branch(tmp_path: Path) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    save(first, 5, 10, 15)
    first.end("finished")
    old = first.path / "checkpoints" / "global_step_10"
    branch = RunFolder.create(settings(tmp_path, resume_dir=str(old)), "embodied")
    assert branch.path != first.path
    assert branch.resumed_from == old
    assert [line.step for line in read_metrics(branch.metrics_file)] == [5, 10]
    assert [line.step for line in read_metrics(first.metrics_file)] == [5, 10, 15]
    assert [item.step for item in first.checkpoints.complete()] == [5, 10, 15]


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/global_step_10"])
def test_what_resume_dir_may_name(tmp_path: Path, name: str) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    save(first, 5, 10)
    first.end("interrupted")
    again = RunFolder.create(settings(tmp_path, resume_dir=str(first.path / name)), "embodied")
    assert again.path == first.path
    assert again.resumed_from == first.path / "checkpoints" / "global_step_10"


def test_another_recipe_does_not_go_on_with_a_run(tmp_path: Path) -> None:
    first = RunFolder.create(settings(tmp_path), "sft")
    save(first, 5)
    first.end("finished")
    with pytest.raises(CheckpointError, match="another recipe") as raised:
        RunFolder.create(settings(tmp_path, resume_dir=str(first.path)), "embodied")
    assert "its run is of recipe `sft`, this one of `embodied`" in str(raised.value)
    assert first.refresh().status == "finished"


def test_a_checkpoint_that_was_copied_begins_a_run(tmp_path: Path) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    save(first, 5)
    copy = tmp_path / "global_step_5"
    (first.path / "checkpoints" / "global_step_5").rename(copy)
    again = RunFolder.create(settings(tmp_path, resume_dir=str(copy)), "embodied")
    assert again.path != first.path
    assert again.resumed_from == copy


def test_a_read_only_run_is_continued_in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    first.write_config_text("actor: {seed: 1}\n")
    save(first, 5)
    first.end("finished")
    before, opens = contents(first), durable.open_below

    def read_only(root: Path, name: str, flags: int) -> int:
        if Path(root) == first.path and flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system", str(Path(root) / name))
        return opens(root, name, flags)

    def accessible(path: Path, mode: int) -> bool:
        return not (path == first.path and mode & os.W_OK)

    monkeypatch.setattr(durable, "open_below", read_only)
    monkeypatch.setattr(os, "access", accessible)
    again = RunFolder.create(settings(tmp_path, resume_dir=str(first.path)), "embodied")
    assert again.path != first.path
    assert again.resumed_from == first.path / "checkpoints" / "global_step_5"
    assert contents(first) == before
    # `rlinf compare` shows what has changed.
    again.write_config_text("actor: {seed: 2}\n")
    assert [file.read_text() for file in again.earlier_config_files] == ["actor: {seed: 1}\n"]


@pytest.mark.parametrize("name", ["missing", "runs"])
def test_there_is_nothing_to_continue_from(tmp_path: Path, name: str) -> None:
    first = RunFolder.create(settings(tmp_path), "embodied")
    path = {"missing": tmp_path / "missing", "runs": first.path}[name]
    with pytest.raises(CheckpointError, match="complete checkpoint") as raised:
        RunFolder.create(settings(tmp_path, resume_dir=str(path)), "embodied")
    assert str(path) in str(raised.value)


def test_checkpoints_elsewhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "store"
    first, second = (RunFolder.create(settings(tmp_path), "embodied", str(elsewhere)) for _ in range(2))
    save(first, 5)
    save(second, 5)
    first.end("failed")
    assert (elsewhere / first.path.name / "global_step_5").is_dir()
    store = RunFolder.open(first.path).checkpoints
    assert [item.step for item in store.complete()] == [5]
    named = settings(tmp_path, resume_dir=str(elsewhere / first.path.name / "global_step_5"))
    assert RunFolder.create(named, "embodied", str(elsewhere)).path == first.path


FACTS = {"actor.model.hidden_dim": 128}


def contents(folder: RunFolder) -> dict[str, bytes]:
    """Return every file of a run, by its path."""
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


class TestARefusedResume:
    @pytest.fixture
    def good(self, tmp_path: Path) -> RunFolder:
        """Return a run that finished after step 12, with a checkpoint of step 10."""
        run = RunFolder.create(settings(tmp_path), "embodied")
        run.write_config(load_job("embodied/pick-laptop", ["runner.max_steps=12"]))
        with MetricsWriter(run.metrics_file) as writer:
            for step in (10, 12):
                writer.log(step, {"env/return": step})
        run.checkpoints.begin(10)
        run.checkpoints.commit(10, Manifest(step=10, facts=FACTS))
        run.update(step=12)
        run.end("finished")
        return run

    def resumed(self, tmp_path: Path, size: int = 128) -> RunFolder:
        return RunFolder.create(
            settings(tmp_path, resume_dir="auto"), "embodied", facts={"actor.model.hidden_dim": size}
        )

    def test_a_checkpoint_that_does_not_fit_changes_nothing(self, tmp_path: Path, good: RunFolder) -> None:
        before = contents(good)
        with pytest.raises(CheckpointError, match="hidden_dim"):
            self.resumed(tmp_path, size=64)
        assert contents(good) == before
        assert list((tmp_path / "runs").iterdir()) == [good.path]

    @pytest.mark.parametrize("status", ["failed", "interrupted"])
    def test_one_that_never_gets_its_workers_changes_nothing(
        self, tmp_path: Path, good: RunFolder, status: str
    ) -> None:
        before, state = contents(good), good.state
        attempt = self.resumed(tmp_path)
        job = load_job("embodied/pick-laptop", ["runner.max_steps=20"])
        with RunRecord.open(job, attempt, events.nobody) as opened:
            assert attempt.refresh().status == "running"
            assert (opened.step, opened.newest) == (10, {"env/return": 10.0})
        attempt.end(status, "the machines cannot be had")
        after = contents(good)
        # The learning curve is drawn anew from the same metrics; the state says when it was written.
        unlike = {name for name in before if after[name] != before[name]} - {"run.json"}
        assert unlike == set()
        assert good.refresh().changed(updated=0) == state.changed(updated=0)

    def test_one_whose_process_dies_leaves_the_end_that_there_was(self, tmp_path: Path, good: RunFolder) -> None:
        self.resumed(tmp_path).update(start=f"{os.getpid()}:1")
        assert good.refresh().outcome == ("finished", "")
        self.resumed(tmp_path).end("failed", "the machines cannot be had")
        assert good.refresh().outcome == ("finished", "")
        assert good.state.step == 12

    def test_once_it_has_workers_the_folder_tells_of_it(self, tmp_path: Path, good: RunFolder) -> None:
        attempt = self.resumed(tmp_path)
        job = load_job("embodied/pick-laptop", ["runner.max_steps=20"])
        with RunRecord.open(job, attempt, events.nobody) as opened:
            opened.started(20, {})
            assert [line.step for line in read_metrics(attempt.metrics_file)] == [10]
            assert "max_steps: 20" in attempt.config_file.read_text()
            assert "max_steps: 12" in (attempt.path / "config.1.yaml").read_text()
        attempt.end("failed", "it diverged")
        assert good.refresh().outcome == ("failed", "it diverged")


def test_keep_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder.create(settings(tmp_path, keep_checkpoints=2), "embodied")
    save(folder, 1, 2, 3)
    assert [item.step for item in folder.checkpoints.complete()] == [2, 3]


def test_the_configuration_is_kept_and_loads_again(tmp_path: Path) -> None:
    folder = RunFolder.create(settings(tmp_path), "embodied")
    token = "hunter2" * 3
    overrides = [
        "runner.max_steps=7",
        f"runner.logger.log_path={tmp_path}",
        "cluster.node_groups=[{label: a, node_ranks: 0, env_configs: [{node_ranks: 0, env_vars: "
        f"[{{API_TOKEN: {token}}}]}}]}}]",
    ]
    job = load_job("embodied/pick-laptop", overrides)
    job.raise_if_bad()
    said = folder.write_config(job)
    text = folder.config_file.read_text()
    assert token not in text
    assert said == config_hash(text)
    again = load_with_lint(str(folder.config_file))
    # Stars are no token: whoever starts this file again is told where one is needed.
    assert "secret-in-file" in [diagnostic.code for diagnostic in again.diagnostics]
    assert again.config is not None
    assert job.config is not None
    assert again.config.model_dump(exclude={"cluster"}) == job.config.model_dump(exclude={"cluster"})
    folder.write_config(job)
    assert not (folder.path / "config.1.yaml").exists()
    folder.write_config(load_job("embodied/pick-laptop", [*overrides, "runner.max_steps=9"]))
    assert (folder.path / "config.1.yaml").read_text() == text
    assert "max_steps: 9" in folder.config_file.read_text()


@pytest.mark.parametrize("name", shipped_configs())
def test_what_is_kept_of_a_shipped_configuration_is_clean(tmp_path: Path, name: str) -> None:
    folder = RunFolder.create(settings(tmp_path), "embodied")
    job = load_with_lint(name)
    folder.write_config(job)
    again = load_with_lint(str(folder.config_file))
    # Findings are in the order of their places, which differ: keys are sorted in what is kept.
    codes = [sorted(diagnostic.code for diagnostic in kept.diagnostics) for kept in (again, job)]
    assert codes[0] == codes[1]
    assert again.config == job.config


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="this is not a run folder"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": "rlinf.run/1"}')
    with pytest.raises(RunError, match="`recipe` is missing"):
        RunFolder.open(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match="cannot be written") as raised:
        RunFolder.create(settings(tmp_path), "embodied")
    assert "runner.logger.log_path" in str(raised.value)
    with pytest.raises(RunError, match=r"choose a shorter `runner\.logger\.experiment_name`"):
        RunFolder.create(settings(tmp_path / "other", experiment_name="x" * 300), "embodied")


def test_a_damaged_checkpoint_is_resumed_from_by_nobody(tmp_path: Path) -> None:
    """The one before it is taken; where the checkpoint itself is named, its file is."""
    run = RunFolder.create(RunnerConfig.model_validate({"logger": {"log_path": str(tmp_path)}}), "one")
    for step in (1, 2):
        (run.checkpoints.begin(step) / "weights").write_bytes(b"abc")
        run.checkpoints.commit(step, Manifest(step=step))
    newest = run.path / "checkpoints" / "global_step_2"
    (newest / "weights").write_bytes(b"abd")
    # A run that was killed between the two writes has no `latest`.
    (run.path / "checkpoints" / "latest").unlink()
    for name in ("auto", run.path, run.path / "checkpoints"):
        source = find_source(str(name), tmp_path, "one")
        assert source is not None
        assert source.step == 1
    with pytest.raises(CheckpointError, match="damaged") as caught:
        find_source(str(newest), tmp_path, "one")
    assert "`weights`" in str(caught.value)


def test_what_is_begun_in_the_same_second_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260314-101502")
    for name in ("play-20260314-101502.mp4", "play-20260314-101502-2.mp4", "play-20260314-101502-3.mp4"):
        path = unused_path(tmp_path, "play", ".mp4")
        assert path == tmp_path / name
        path.touch()
