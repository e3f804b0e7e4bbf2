"""`rlinf train --rehearse`: what it runs, what it says, and that nobody takes it for a training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from recipes.embodied.advice.embodied_flow import EmbodiedFlow
from rlinf_core.job.load import load_job
from rlinf_core.process import pacing
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.advice.test_advice import JOB, both, record_run
from tests.unit.cli.conftest import Cli


class Started:
    """A run in the place of the job's: of three steps that take 7 seconds."""

    jobs: ClassVar[list[Any]] = []
    paced: ClassVar[list[Any]] = []

    @classmethod
    def start(cls, file: str, overrides: Sequence[str], assume: Any, **_: Any) -> int:
        job = load_job(file, list(overrides))
        job.raise_if_bad()
        cls.jobs.append(job)
        cls.paced.append(pacing.wanted)
        config: Any = job.config
        folder = RunFolder.create(config.runner, "embodied")
        folder.write_config(job)
        lines = [{"step": step, "time": 0.0, "metrics": {"time/step": 7.0 + 2 * (step == 1)}} for step in range(1, 5)]
        folder.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        folder.end("finished")
        return 0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Started, "jobs", [])
    monkeypatch.setattr(Started, "paced", [])
    monkeypatch.setattr("rlinf_cli.run.starting.start", Started.start)
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(model="A800", memory=""))
    return file


def test_stand_ins_take_the_place_of_work_and_save_nothing(cli: Cli, job: Path) -> None:
    runs = both(job).split(",")
    words = ["runner.save_interval=5", "runner.max_staleness=1", "runner.max_steps=4"]
    ended = cli("train", job, *runs, "--rehearse", *words)
    assert ended.code == 0, ended.err
    (rehearsed,) = Started.jobs
    config = rehearsed.config
    assert config.env.train.env_type.endswith("stand_ins:StandInEnv")
    assert config.actor.model.model_type.endswith("stand_ins:StandInPolicy")
    # As many numbers as the policy that it stands for: two networks of 128, from 18 states.
    assert config.actor.model.options["numbers"] > 30_000
    assert (config.runner.max_staleness, config.runner.max_steps) == (1, 4)
    assert (config.runner.save_interval, config.runner.val_check_interval) == (-1, -1)
    assert not config.runner.save_on_interrupt
    assert rehearsed.world_sizes == load_job(str(job)).world_sizes
    paces = Started.paced[0].paces
    assert paces["env/step"].fix == pytest.approx(0.07, rel=0.01)
    assert set(paces) == {"env/step", "rollout/policy", "rollout/values", "training/update"}
    # Of the present process nothing is left.
    assert pacing.wanted is None
    assert "nothing was trained, and nothing saved" in ended.err
    assert "s a step predicted, 7 s rehearsed, over 2 steps" in ended.out


def test_no_one_takes_it_for_a_training(cli: Cli, job: Path) -> None:
    run, _ = both(job).split(",")
    assert cli("train", job, run, "--rehearse").code == 0
    listed = json.loads(cli("runs", "--json").out)["runs"]
    assert {row["kind"] for row in listed if row["name"].startswith("rehearsal-")} == {"rehearsal"}
    assert {row["kind"] for row in listed if not row["name"].startswith("rehearsal-")} == {"training"}
    assert "embodied, rehearsal" in cli("runs").out
    name = next(row["name"] for row in listed if row["kind"] == "rehearsal")
    assert f"run `{name}` is a rehearsal" in cli("inspect", "placement", job, "--advise", name).err


def test_the_last_run_is_taken_where_none_is_named(cli: Cli, job: Path) -> None:
    assert "no run of recipe `embodied` tells how long its work takes" in cli("train", job, "--rehearse").err
    for name in ("first", "last"):
        run = record_run(job, name, "0", processes=1)
        state = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**state, "status": "finished"}))
    assert json.loads(cli("train", job, "--rehearse", "--json").out)["runs"][0].startswith("last-")
    # A rehearsal is newer now, and has no record of work.
    assert json.loads(cli("train", job, "--rehearse", "--json").out)["runs"][0].startswith("last-")


def test_what_was_never_seen_is_not_rehearsed(cli: Cli, job: Path) -> None:
    run = record_run(job, "one", "0", processes=1)
    job.write_text(JOB.format(model="H20", memory=""))
    ended = cli("train", job, str(run), "--rehearse")
    assert "on H20 was never seen by these runs" in ended.err
    assert Started.jobs == []


def test_options_of_other_trainings_are_refused(cli: Cli, job: Path) -> None:
    assert "cannot be used with --rehearse" in cli("train", job, "--rehearse", "--seeds", "2").err


def test_neither_resumed_nor_evaluated_nor_logged(cli: Cli, job: Path) -> None:
    run, _ = both(job).split(",")
    words = ["runner.resume_dir=auto", "runner.val_check_interval=2", "runner.logger.logger_backends=[tensorboard]"]
    ended = cli("train", job, run, "--rehearse", *words, f"actor.checkpoint_save_path={job.parent}/theirs")
    assert ended.code == 0, ended.err
    config = Started.jobs[0].config
    assert (config.runner.resume_dir, config.runner.val_check_interval) == (None, -1)
    assert (config.runner.logger.logger_backends, config.actor.checkpoint_save_path) == ((), None)


def test_what_cannot_be_rehearsed_is_said(cli: Cli, job: Path) -> None:
    run, _ = both(job).split(",")
    for words, message in [
        ((job, run, "actor.seed=1,2"), "`actor.seed=1,2`: rehearse one value after the other"),
        (("-", run), "give a path, not `-`"),
        ((job, run, "runner.only_eval=true"), "no steps of training that could be rehearsed"),
        ((job, "no-run"), "there is no run `no-run`"),
        (("math_laptop", run), "one of recipe `embodied`, and the file is of `math`"),
    ]:
        ended = cli("train", *words, "--rehearse")
        assert ended.code, words
        assert message in " ".join(ended.err.split()), (words, ended.err)
    (Path(run) / "profile.json").unlink()
    assert "has no record of its calls" in cli("train", job, run, "--rehearse").err
    assert Started.jobs == []


def test_the_rehearsal_of_another_process_is_not_summed_up(
    cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = both(job).split(",")

    def beside(*arguments: Any, **options: Any) -> int:
        Started.start(*arguments, **options)
        Started.start(*arguments, **options)
        (last,) = Path("runs").glob("rehearsal-*-2")
        state = json.loads((last / "run.json").read_text())
        (last / "run.json").write_text(json.dumps({**state, "pid": 1}))
        return 0

    monkeypatch.setattr("rlinf_cli.run.starting.start", beside)
    folder = json.loads(cli("train", job, run, "--rehearse", "--json").out)["folder"]
    assert Path(folder).name.startswith("rehearsal-")
    assert not folder.endswith("-2")


@pytest.mark.parametrize("name", ["franka_hil", "franka_real", "gymnasium_sac"])
def test_no_robot_person_or_recording_is_part_of_it(name: str) -> None:
    loaded: Any = load_job(name)
    rehearsed: Any = load_job(name, list(EmbodiedFlow(loaded.config).rehearsal()))
    rehearsed.raise_if_bad()
    train = rehearsed.config.env.train
    assert train.env_type.endswith("stand_ins:StandInEnv")
    assert (train.intervention.source, train.judge.source) == ("none", "environment")
    assert rehearsed.config.algorithm.replay.recording_path is None
    # Each step of a rehearsal learns, as those that were recorded, and none computes actions.
    assert rehearsed.config.algorithm.learning_starts == 1
    assert rehearsed.config.algorithm.random_steps > 10**6


@pytest.mark.parametrize("name", ["math_laptop", "agent_calculator", "math_gsm8k", "agent_search"])
def test_language_models_are_neither_loaded_nor_saved(name: str) -> None:
    loaded: Any = load_job(name)
    flow = loaded.recipe.load(loaded.recipe.flow)(loaded.config)
    rehearsed: Any = load_job(name, list(flow.rehearsal()))
    rehearsed.raise_if_bad()
    assert not rehearsed.config.runner.saves_model
    assert rehearsed.config.runner.sample_interval == -1
