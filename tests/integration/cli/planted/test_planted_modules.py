"""Code planted in runs of several recipes, and beside their files, and commands that start Ray: nothing of it runs.

`test_planted_payloads.py` has every command over every file of a checkpoint of PPO.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.runners.storage.run_folder import RunFolder
from tests.payloads import PAYLOADS, plant, plant_neighbours

# A command starts Ray, and takes up to half a minute.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
RLINF = Path(sys.executable).with_name("rlinf")
EMBODIED = (
    *("recipe=embodied", "env.train.task=reach", "env.train.total_num_envs=4", "env.train.max_episode_steps=5"),
    *("env.train.max_steps_per_rollout_epoch=5", "actor.global_batch_size=20", "actor.model.hidden_dim=8"),
    *("env.eval.total_num_envs=2", "env.eval.max_episode_steps=5"),
)
JOBS = {
    "embodied": (*EMBODIED, "algorithm.update_epoch=1"),
    "off_policy": (
        *(*EMBODIED, "actor.model.model_type=squashed_policy", "algorithm.loss_type=sac"),
        *("algorithm.learning_starts=10", "algorithm.random_steps=10", "algorithm.replay.capacity=200"),
    ),
    "math": (
        *("math_laptop", "actor.model.hidden_dim=32", "actor.model.num_layers=1", "actor.warm_start.steps=2"),
        *("data.rollout_batch_size=4", "data.val_size=4", "algorithm.group_size=2", "runner.save_format=dcp"),
    ),
}
SHORT = ("runner.max_steps=1", "runner.save_interval=1", "runner.val_check_interval=-1", "runner.max_restarts=0")
LONGER = ("runner.max_steps=2", "runner.val_check_interval=-1", "runner.max_restarts=0")
STEP = "checkpoints/global_step_1"
# What a checkpoint has besides its weights and its manifest.
OF_ITS_OWN = {"off_policy": {"policy.json", "off_policy.safetensors", "states.npy", "0.npz"}, "math": {"data.json"}}
USES = {
    "train": ("train", *LONGER, "runner.resume_dir={run}"),
    "report": ("report", "{run}"),
    "memory": ("inspect", "memory", "{run}/config.yaml"),
    "eval": ("eval", "{run}"),
    "play": ("eval", "--play", "{run}", "-o", "{out}.mp4"),
    "export": ("export", "{run}", "-o", "{out}"),
}
# Which reader a file is meant for, by its suffix; the others get pickles.
KINDS = {".safetensors": "archive", ".npz": "numbers", ".npy": "numbers"}


def rlinf(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(item) for item in (RLINF, *arguments)]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a job, and the folder of its run."""
    home = tmp_path_factory.mktemp(request.param)
    done = rlinf("train", *JOBS[request.param], *SHORT, cwd=home)
    assert done.returncode == 0, done.stderr
    run = RunFolder.latest(home / "runs")
    assert run is not None
    return request.param, run.path


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("trained", ["off_policy", "math"], indirect=True)
def test_no_run_that_goes_on_runs_code_of_its_checkpoint(trained: tuple[str, Path], part: int, tmp_path: Path) -> None:
    """Every file in one of three parts of the test."""
    name, original = trained
    files = sorted(path.relative_to(original) for path in (original / STEP).rglob("*") if path.is_file())
    # Of every kind one at least, and one in this part: a checkpoint of a small language model has three.
    assert {"manifest.json", *OF_ITS_OWN[name]} <= {file.name for file in files}
    assert any(file.suffix == ".safetensors" for file in files)
    assert files[part::3]
    marker = tmp_path / "marker"
    for number, file in enumerate(files[part::3]):
        run = tmp_path / str(number) / "runs" / original.name
        shutil.copytree(original, run)
        plant(run, str(file), PAYLOADS[KINDS.get(file.suffix, "pickle")](marker))
        done = rlinf("train", *JOBS[name], *LONGER, f"runner.resume_dir={run / STEP}", cwd=run.parents[1])
        assert not marker.exists(), file
        assert "Traceback" not in done.stderr, (file, done.stderr)


@pytest.mark.parametrize("place", ["", STEP], ids=["run", "checkpoint"])
@pytest.mark.parametrize(
    ("trained", "use"),
    [(name, use) for name in JOBS for use in (USES if name == "embodied" else ("train", "report", "memory"))],
    indirect=["trained"],
    scope="module",
)
def test_no_command_imports_modules_of_a_run(trained: tuple[str, Path], use: str, place: str, tmp_path: Path) -> None:
    """Started within the folder that was received, workers and other children included."""
    name, original = trained
    marker, run = tmp_path / "marker", tmp_path / "runs" / original.name
    shutil.copytree(original, run)
    plant_neighbours(run / place, marker)
    job = JOBS[name] if use == "train" else ()
    words = (word.format(run=run, out=tmp_path / "out") for word in USES[use])
    done = rlinf(next(words), *job, *words, cwd=run / place)
    assert not marker.exists()
    assert done.returncode == 0, done.stderr
