"""`rlinf eval`: its table, its exit status, and the arguments that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli

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
