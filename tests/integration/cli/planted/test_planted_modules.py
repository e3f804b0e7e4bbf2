"""Code planted in files of runs of several recipes, beside them, and in every file of a checkpoint: nothing of it runs.

Commands without Ray are tried in tests/unit/cli/codes/test_planted.py, with every kind of payload in every file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from recipes.training.weights.shard_files import shard_name
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
        *("math/sums-laptop", "actor.model.hidden_dim=32", "actor.model.num_layers=1", "actor.warm_start.steps=2"),
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


# A step of a run, and then a start of Ray for every file, payload and command.
# Every file of a checkpoint, with the payloads that one of its readers could run.
FILES: Final = {
    f"actor/{shard_name(1)}": ("pickle", "archive"),
    "env/0.npz": ("pickle", "numbers"),
    "manifest.json": ("pickle",),
    "policy.json": ("pickle",),
}
TRAIN: Final = ("train", *JOBS["embodied"])
COMMANDS: Final = {
    "eval": ("eval", "{run}", "-o", "{out}"),
    "play": ("eval", "--play", "{run}", "-o", "{out}"),
    "resume": (*TRAIN, *LONGER, f"runner.resume_dir={{run}}/{STEP}"),
    "load": (*TRAIN, *SHORT, f"actor.checkpoint_load_path={{run}}/{STEP}"),
}


@pytest.mark.parametrize("trained", ["embodied"], indirect=True)
def test_the_files_are_those_of_a_checkpoint(trained: tuple[str, Path]) -> None:
    step = trained[1] / STEP
    assert {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()} == set(FILES)


@pytest.mark.parametrize("trained", ["embodied"], indirect=True)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in FILES.items() for kind in kinds])
def test_no_command_runs_what_is_in_a_checkpoint(
    trained: tuple[str, Path], tmp_path: Path, name: str, kind: str, command: str
) -> None:
    _, original = trained
    marker, run = tmp_path / "marker", tmp_path / "runs" / original.name
    shutil.copytree(original, run)
    plant(run, f"{STEP}/{name}", PAYLOADS[kind](marker))
    ended = rlinf(*(word.format(run=run, out=tmp_path / "out") for word in COMMANDS[command]), cwd=tmp_path)
    assert not marker.exists()
    assert "Traceback" not in ended.stderr
    if name.startswith("actor/"):
        assert ended.returncode != 0
