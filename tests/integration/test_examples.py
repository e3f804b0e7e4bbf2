"""The files of examples/: each does what its first lines say."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import channel_pipeline, hello_workers, own_environment, own_reward
from recipes.embodied.envs.contract import check_env
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import Cluster
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.rlinf_command import rlinf
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
    rlinf(folder, *words)
    run = RunFolder.latest(folder / "runs")
    assert run is not None
    assert read_metrics(run.metrics_file)[-1].metrics[metric] >= least


def cells_of_notebook() -> list[str]:
    notebook = json.loads((EXAMPLES / "sweep_and_compare.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of_notebook() -> str:
    notebook = json.loads((EXAMPLES / "sweep_and_compare.ipynb").read_text(encoding="utf-8"))
    return json.dumps([cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"])


def test_notebook_was_executed_and_is_small() -> None:
    outputs = outputs_of_notebook()
    assert "image/png" in outputs
    assert "noise, by " in outputs
    assert '"output_type": "error"' not in outputs
    # Nothing of the machine that executed it.
    assert not re.search(r"/(tmp|home|root|work)/", outputs)
    assert (EXAMPLES / "sweep_and_compare.ipynb").stat().st_size < 200_000


def test_cells_of_the_notebook_read_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        words = command[3:]
        calls.append(words)
        assert unread(" ".join(["rlinf", *words])) == []
        runs = [{"folder": str(bandit_run(tmp_path, share, seed))} for share in (0.02, 0.3) for seed in range(3)]
        return SimpleNamespace(stdout=json.dumps({"runs": runs}) if words[0] == "train" else "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    # Its first import asks a program for fonts.
    import_module("matplotlib.pyplot")
    monkeypatch.setattr(subprocess, "run", run)
    namespace: dict[str, Any] = {}
    for cell in cells_of_notebook():
        exec(cell, namespace)  # noqa: S102 - as a notebook does
    assert [words[0] for words in calls] == ["init", "train", "compare"]
    assert "exploration 0.02 - checkpoints [3]" in capsys.readouterr().out
    # Of each value three seeds and their mean.
    assert len(namespace["axes"].lines) == 8


def bandit_run(folder: Path, share: float, seed: int) -> Path:
    """Make a run as the notebook's sweep leaves it."""
    runner = RunnerConfig.model_validate({"logger": {"log_path": str(folder / "swept")}})
    run = RunFolder.create(runner, "bandit")
    run.write_config_text(f"exploration: {share}\nseed: {seed}\n")
    with MetricsWriter(run.metrics_file) as writer:
        writer.log(0, {"eval/return": 0.0})
        for step in (1, 2, 3):
            writer.log(step, {"env/return": share * step})
    run.checkpoints.begin(3)
    run.checkpoints.commit(3, Manifest(step=3))
    return run.path


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_notebook_can_be_executed_again(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="executing a notebook needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="executing a notebook needs nbclient and ipykernel")
    import nbformat

    notebook: Any = nbformat.read(EXAMPLES / "sweep_and_compare.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "image/png" in json.dumps(notebook)
    assert "noise, by " in json.dumps(notebook)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_cells_of_the_notebook_train_a_real_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {}
    for cell in cells_of_notebook():
        exec(cell.replace("0.3), 3, 20", "0.3), 2, 4"), namespace)  # noqa: S102
    assert len(namespace["runs"]) == 4
    assert "exploration" in capsys.readouterr().out
