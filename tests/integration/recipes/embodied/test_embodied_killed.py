"""A run that is killed with -9 at any moment, and started again, ends with the weights of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.recipes.conftest import SMALL, Train, read_weights

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

STEPS = ("runner.max_steps=4", "runner.save_interval=1")
DRIVER = """
import sys
from recipes.embodied.program import program
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import RunFolder

job = load_job("laptop", sys.argv[1:], environ={})
job.raise_if_bad()
folder = RunFolder.create(job.config.runner, "embodied")
print("folder", folder.path, flush=True)

def tell(event):
    print(type(event).__name__, getattr(event, "phase", ""), getattr(event, "step", ""), flush=True)

program(job, folder, tell)
folder.end("finished")
"""


def drive(log_path: Path, *overrides: str) -> subprocess.Popen[str]:
    words = [*SMALL, *STEPS, f"runner.logger.log_path={log_path}", *overrides]
    return subprocess.Popen([sys.executable, "-c", DRIVER, *words], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "moment",
    ["StepFinished  1", "PhaseStarted save_checkpoint 2", "PhaseStarted actor_training 3", "CheckpointSaved  3"],
)
@pytest.mark.parametrize("episode", [10, 25], ids=["whole", "spanning"])
def test_killed_and_continued(train: Train, tmp_path: Path, moment: str, episode: int) -> None:
    """With episodes that end with their pass, and with such as span two or three."""
    long = f"env.train.max_episode_steps={episode}"
    whole = train(*STEPS, long)
    with drive(tmp_path / "killed", long) as killed:
        assert killed.stdout is not None
        assert any(line.strip() == moment for line in killed.stdout)
        os.kill(killed.pid, signal.SIGKILL)
    with drive(tmp_path / "killed", long, "runner.resume_dir=auto") as again:
        output, _ = again.communicate()
    assert again.returncode == 0
    assert "RunFinished" in output
    folder = Path(output.splitlines()[0].removeprefix("folder "))
    mine, theirs = whole.weights(), read_weights(folder / "checkpoints" / "global_step_4")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
