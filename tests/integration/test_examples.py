"""The files of examples/: each does what its first lines say."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import channel_pipeline, hello_workers, own_environment, own_reward
from recipes.embodied.envs.contract import check_env
from rlinf_cli.lint.load import load_with_lint
from rlinf_core import Cluster, RunFolder
from rlinf_core.runners.metrics import read_metrics
from tests.unit.docs.test_commands_of_pages import unread

EXAMPLES = Path(__file__).parents[2] / "examples"
# Each runs in a test of this file; a recipe's example has a test of its own.
RUN_HERE = {
    "hello_workers.py",
    "channel_pipeline.py",
    "own_environment.py",
    "own_environment.yaml",
    "own_reward.py",
    "sweep_and_compare.ipynb",
}


def test_every_example_has_a_test() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file() and not path.name.startswith("own_recipe")}
    assert there == RUN_HERE


@pytest.mark.ray
def test_hello_workers_answer_by_rank(cluster: Cluster) -> None:
    assert hello_workers.main(cluster) == [f"Hello, world, from rank {rank} of 4" for rank in range(4)]


@pytest.mark.ray
def test_channel_pipeline_loses_no_token(cluster: Cluster) -> None:
    put, batches = channel_pipeline.main(cluster)
    assert sum(batches) == put
    assert len([batch for batch in batches if batch < channel_pipeline.TOKENS]) <= 1


def test_own_environment_keeps_the_contract() -> None:
    check_env(own_environment.Reach)


def test_own_environment_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_environment.py"), run_name="__main__")
    assert capsys.readouterr().out == "the environment keeps every promise\n"


def test_own_reward_gives_half_for_a_near_answer() -> None:
    assert [own_reward.score(text, "7")["reward"] for text in ("7", "8", "12", "seven")] == [1.0, 0.5, 0.0, 0.0]


def commands_of(file: str) -> list[str]:
    """Return the `rlinf` commands that an example's first lines show."""
    return re.findall(r"`(rlinf [^`]+)`", (EXAMPLES / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", ["own_environment.py", "own_reward.py"])
def test_jobs_of_examples_are_valid(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES)
    (command,) = commands_of(file)
    _, _, name, *overrides = command.split()
    job = load_with_lint(name, overrides=overrides)
    assert job.ok, job.diagnostics


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "steps", "metric", "least"),
    [("own_environment.py", 20, "env/success_once", 0.8), ("own_reward.py", 2, "reward/number", 0.5)],
)
def test_jobs_of_examples_learn(file: str, steps: int, metric: str, least: float, tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES, tmp_path / "examples")
    (command,) = commands_of(file)
    words = [*command.split()[1:], f"runner.max_steps={steps}"]
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = RunFolder.latest(folder / "runs")
    assert run is not None
    assert read_metrics(run.metrics_file)[-1].metrics[metric] >= least


def cells_of_notebook() -> list[str]:
    notebook = json.loads((EXAMPLES / "sweep_and_compare.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_notebook_trains_every_pair_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        words = command[3:]
        calls.append(words)
        assert unread(" ".join(["rlinf", *words])) == []
        line = {"step": 1, "metrics": {"env/success_once": 0.25}}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
        return SimpleNamespace(stdout=json.dumps({"folder": str(tmp_path), "evaluation": {}}))

    monkeypatch.setattr(subprocess, "run", run)
    namespace: dict[str, Any] = {}
    for cell in cells_of_notebook():
        exec(cell, namespace)  # noqa: S102 - as a notebook does
    pairs = {(words[2], words[3]) for words in calls if words[0] == "train"}
    assert len(pairs) == len(namespace["LEARNING_RATES"]) * len(namespace["SEEDS"]) == 4
    assert [words[0] for words in calls[4:]] == ["runs", "compare"]
    assert capsys.readouterr().out.splitlines()[-1] == "0.001 2 [0.25]"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_notebook_compares_real_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings, *others = cells_of_notebook()
    namespace: dict[str, Any] = {}
    exec(settings, namespace)  # noqa: S102
    namespace |= {"SEEDS": (1,), "STEPS": 2}
    for cell in others:
        exec(cell, namespace)  # noqa: S102
    assert "actor.optim.lr" in capsys.readouterr().out
    assert (tmp_path / "sweep" / "compared.png").stat().st_size > 0
