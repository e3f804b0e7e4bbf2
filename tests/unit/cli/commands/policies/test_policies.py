"""`rlinf eval` and `rlinf export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.job.job_file import without_start, without_training_data
from rlinf_cli.run.policies import find_run_folder
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RunError
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.typed import Cli

Returning = Callable[[str, Mapping[str, Any]], None]
FIGURES = {
    "episodes": 15,
    "success_at_end": 11 / 15,
    "success_at_end_interval": [0.48, 0.89],
    "success_once": 11 / 15,
    "success_once_interval": [0.48, 0.89],
    "outcomes": {"success": 11, "error": 4},
    "return": 0.5,
    "episode_len": 30.0,
}
SHARES = {"problems": 40.0, "pass@1": 0.0, "pass@1_low": 0.0, "pass@1_high": 0.09, "reward": 0.0, "length": 6.0}
COUNTS = {"answers": 160.0, "cut_off": 160.0, "left_out": 0.0}


@pytest.fixture
def returning(monkeypatch: pytest.MonkeyPatch) -> Returning:
    def set_up(module: str, result: Mapping[str, Any]) -> None:
        monkeypatch.setattr(f"{module}.evaluate", lambda *_, **__: result)

    return set_up


def episodes(**fields: Any) -> dict[str, Any]:
    return {"tasks": {"pick": FIGURES}, "total": FIGURES, "left_out": 0, "env_errors": [], "videos": [], **fields}


def answers(left_out: int) -> dict[str, Any]:
    whole = {**SHARES, **COUNTS, "left_out": float(left_out), "answers": 160.0 - left_out, "cut_off": 160.0 - left_out}
    return {"sets": {"all": whole}, "sampling": {"max_new_tokens": 6}, "left_out": left_out}


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize("left_out", [0, 1])
def test_an_evaluation_of_episodes_that_lacks_some_ends_with_one(
    left_out: int, output: str, cli: Cli, returning: Returning, tmp_path: Path
) -> None:
    returning("recipes.embodied.using.evaluation", episodes(left_out=left_out))
    ended = cli("eval", "laptop", "-o", tmp_path / "out", "--output", output)
    assert ended.code == left_out
    if output == "text":
        assert ("15, 1 left out" in ended.out) == bool(left_out)
        assert ("incomplete: 1 of 16 episodes were left out" in ended.err) == bool(left_out)


def test_errors_of_the_environment_are_told_with_their_line(cli: Cli, returning: Returning, tmp_path: Path) -> None:
    returning("recipes.embodied.using.evaluation", episodes(env_errors=["raised RuntimeError at ship.py:25 in step"]))
    ended = cli("eval", "laptop", "-o", tmp_path / "out")
    assert ended.code == 0
    assert "4 episodes count as failed, by an error of the environment: raised RuntimeError at ship.py:25" in ended.err


@pytest.mark.parametrize("left_out", [0, 3])
def test_answers_that_are_cut_off_or_left_out_are_counted(
    left_out: int, cli: Cli, returning: Returning, tmp_path: Path
) -> None:
    returning("recipes.language.using.answer_scoring", answers(left_out))
    ended = cli("eval", "math_eval", "-o", tmp_path / "out")
    assert ended.code == bool(left_out)
    kept = 160 - left_out
    assert f"{kept} of {kept} answers cut off at max_new_tokens=6" in ended.err
    header, row = ended.out.splitlines()
    assert "cut off" in header
    assert row.endswith(f"{kept} of {kept}")
    assert ("left out" in header) == bool(left_out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("eval", "laptop", "runner.resume_dir=runs/one"), "`--checkpoint runs/one`"),
        (("eval", "math_eval", "runner.resume_dir=runs/one"), "`--checkpoint runs/one`"),
        (("eval", "laptop", "runner.resume_dir=auto"), "`--checkpoint RUN`"),
        (("play", "laptop", "runner.resume_dir=runs/one"), "`--checkpoint runs/one`"),
        (("record", "laptop", "runner.resume_dir=runs/one"), "`--checkpoint runs/one`"),
        (("eval", "laptop", "runner.max_steps=5"), "`runner.max_steps` has no effect on `rlinf eval`"),
        (("eval", "math_eval", "actor.optim.lr=0.1"), "`actor.optim.lr` has no effect on `rlinf eval`"),
        (("record", "laptop", "algorithm.gamma=0.9"), "`algorithm.gamma` has no effect on `rlinf record`"),
        (("record", "laptop", "env.eval.seed=7"), "write `env.train.seed`"),
        (("play", "laptop", "runner.save_interval=5"), "has no effect on `rlinf play`"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(
    arguments: tuple[str, ...], says: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert says in cli.fails(2, *arguments)


def test_a_file_that_resumes_training_needs_the_weights(
    cli: Cli, returning: Returning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "job.yaml").write_text("extends: laptop\nrunner: {resume_dir: one}\n")
    returning("recipes.embodied.using.evaluation", episodes())
    ended = cli("eval", "job.yaml", "-o", tmp_path / "out")
    assert (ended.code, "--checkpoint one" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("unheard-of", "there is no recipe `unheard-of`"), ("math", "`cluster`")],
)
def test_a_run_that_cannot_be_exported_says_why(cli: Cli, tmp_path: Path, recipe: str, message: str) -> None:
    logger = {"experiment_name": "one", "log_path": str(tmp_path)}
    run = RunFolder.create(RunnerConfig.model_validate({"logger": logger}), recipe)
    text = "recipe: unheard-of\n" if recipe == "unheard-of" else "recipe: math\ndata: {train_data_paths: problems}\n"
    run.write_config_text(text)
    ended = cli("export", run.path)
    assert ended.code != 0
    assert message in ended.err


@pytest.mark.parametrize("overrides", [("data.train_data_paths=to/be/made",), ("data.train_data_paths=[]",)])
def test_a_recording_needs_no_file_that_only_training_reads(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    job = load_job("sft_laptop", (f"runner.logger.log_path={tmp_path}", *overrides))
    assert not job.ok
    assert without_training_data(job).ok


@pytest.mark.parametrize(
    "override",
    ["data.normalization=all", "data.train_data_paths={path: a, episodes: [-1]}", "runner.resume_dir=not/there"],
)
def test_it_needs_everything_else_of_the_file(override: str) -> None:
    job = load_job("sft_laptop", ("data.train_data_paths=to/be/made", override))
    assert not without_training_data(job).ok


def test_a_policy_is_used_with_what_training_refuses() -> None:
    job = load_job("math_laptop", ("rollout.sampling_params.temperature=0",))
    assert not job.ok
    assert without_training_data(job).ok


def test_a_run_needs_no_checkpoint_that_it_was_resumed_from() -> None:
    job = without_training_data(load_job("sft_laptop", ("data.train_data_paths=to/be/made", "runner.resume_dir=gone")))
    assert not job.ok
    assert without_start(job).ok


def test_a_folder_of_runs_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="this folder is not a run") as caught:
        find_run_folder("empty")
    assert caught.value.help == "name a run folder or a job file"
    (tmp_path / "laptop").mkdir()
    assert find_run_folder("laptop") is None
