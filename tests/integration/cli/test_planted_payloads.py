"""A program in every file of a checkpoint, one at a time, and the commands that start Ray over it: nothing runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.runners.storage.run_folder import RunFolder
from tests.integration.cli.test_train_embodied import SMALL
from tests.payloads import PAYLOADS, plant

# A step of a run, and then some thirty commands that each start Ray.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
RLINF = Path(sys.executable).with_name("rlinf")


def rlinf(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RLINF, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=140, check=False
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, with a checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    ended = rlinf("train", *SMALL, "runner.max_steps=1", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    run = RunFolder.latest(str(folder / "runs"))
    assert run is not None
    return run.path


@pytest.mark.parametrize("kind", ["pickle", "archive"])
def test_no_command_runs_what_is_in_a_checkpoint(made: Path, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    names = sorted(
        str(path.relative_to(made)) for path in made.glob("checkpoints/global_step_1/**/*") if path.is_file()
    )
    assert "checkpoints/global_step_1/actor/.metadata" in names
    for number, name in enumerate(names):
        run = tmp_path / str(number) / made.name
        shutil.copytree(made, run)
        plant(run, name, PAYLOADS[kind](marker))
        checkpoint = run / "checkpoints" / "global_step_1"
        out = run.parent / "out"
        for arguments in (
            ("eval", run, "--out", out / "eval"),
            ("play", run, "--out", out / "play"),
            ("export", run, "--out", out / "export"),
            ("train", *SMALL, "runner.max_steps=2", "runner.max_restarts=0", f"runner.resume_dir={checkpoint}"),
            (
                "train",
                *SMALL,
                "runner.max_steps=1",
                "runner.max_restarts=0",
                f"actor.checkpoint_load_path={checkpoint}",
            ),
        ):
            ended = rlinf(*arguments, cwd=run.parent)
            assert not marker.exists(), (name, arguments)
            if name.endswith((".metadata", ".distcp")):
                assert ended.returncode != 0, (name, arguments)
