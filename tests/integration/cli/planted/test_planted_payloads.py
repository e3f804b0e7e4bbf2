"""A program in every file of a checkpoint, one at a time, and the commands that start Ray over it: nothing runs.

Commands without Ray are tried in tests/unit/cli/codes/test_planted.py, with every kind of payload in every
file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from recipes.training.state.shard_files import shard_name
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.integration.cli.test_train_embodied import SMALL
from tests.payloads import PAYLOADS, plant

# A step of a run, and then a start of Ray for every file, payload and command.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
RLINF = Path(sys.executable).with_name("rlinf")
STEP: Final = "checkpoints/global_step_1"
# Every file of a checkpoint, with the payloads that one of its readers could run.
FILES: Final = {
    f"actor/{shard_name(1)}": ("pickle", "archive"),
    "env/0.npz": ("pickle", "numbers"),
    "manifest.json": ("pickle",),
    "policy.json": ("pickle",),
}
TRAIN: Final = ("train", *SMALL, "runner.max_restarts=0", "runner.val_check_interval=-1")
COMMANDS: Final = {
    "eval": ("eval", "{run}", "-o", "{out}"),
    "play": ("eval", "--play", "{run}", "-o", "{out}"),
    "resume": (*TRAIN, "runner.max_steps=2", f"runner.resume_dir={{run}}/{STEP}"),
    "load": (*TRAIN, "runner.max_steps=1", f"actor.checkpoint_load_path={{run}}/{STEP}"),
}


def rlinf(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RLINF, *arguments], cwd=cwd, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, with a checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    ended = rlinf(*TRAIN, "runner.max_steps=1", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    run = RunFolder.latest(str(folder / "runs"))
    assert run is not None
    return run.path


def test_the_files_are_those_of_a_checkpoint(made: Path) -> None:
    step = made / STEP
    assert {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()} == set(FILES)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in FILES.items() for kind in kinds])
def test_no_command_runs_what_is_in_a_checkpoint(
    made: Path, tmp_path: Path, name: str, kind: str, command: str
) -> None:
    marker, run = tmp_path / "marker", tmp_path / "runs" / made.name
    shutil.copytree(made, run)
    plant(run, f"{STEP}/{name}", PAYLOADS[kind](marker))
    ended = rlinf(*(word.format(run=run, out=tmp_path / "out") for word in COMMANDS[command]), cwd=tmp_path)
    assert not marker.exists()
    assert "Traceback" not in ended.stderr
    if name.startswith("actor/"):
        assert ended.returncode != 0
