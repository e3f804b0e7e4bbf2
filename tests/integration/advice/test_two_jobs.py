"""Two jobs of one person on the same stand-in accelerator of this machine: who waits, who ends, and who shares."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.golden.command_line import REPOSITORY
from tests.integration.advice.test_predictions import EMBODIED, STAND_INS, WORK
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def train(tmp_path: Path) -> Generator[Run]:
    """Start `rlinf train` of a small job, whose output goes to a file of its name."""
    small = EMBODIED.replace("total_num_envs: 64", "total_num_envs: 16").replace("batch_size: 512", "batch_size: 128")
    (tmp_path / "job.yaml").write_text(small)
    (tmp_path / "locks").mkdir()
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(REPOSITORY)]),
        "STAND_IN_LOCKS": str(tmp_path / "locks"),
        "STAND_IN_WORK": json.dumps(WORK),
        # Other tests have devices of this name, too.
        "STAND_IN_VENDOR": f"STAND{secrets.token_hex(4)}",
        "RLINF_CLAIMS": "wait",
        "RLINF_ADDRESS": "local",
    }
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "rlinf_cli", "train", "job.yaml", *arguments]
        with (tmp_path / name).open("w") as output:
            process = subprocess.Popen(
                [*argv, f"runner.logger.experiment_name={name}"],
                cwd=tmp_path,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()


def test_a_second_job_waits_ends_or_shares(train: Run, tmp_path: Path) -> None:
    def says(name: str, words: str) -> None:
        until(lambda: words in (tmp_path / name).read_text(), f"`{words}` of {name}", 600, 0.2)

    first = train("first", "runner.max_steps=-1")
    says("first", "step 1")
    assert train("ends", "--no-wait").wait() == 3
    says("ends", "another job holds accelerator 0 of node 0: runs/first-")
    train("shares", "--share", "runner.max_steps=1")
    says("shares", "shared with other jobs: accelerator 0 of node 0: runs/first-")
    says("shares", "finished")
    # A signal ends a wait, and nothing was started by it.
    stopped = train("stopped")
    says("stopped", "waiting for accelerator 0 of node 0: runs/first-")
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait() == 130
    waits = train("waits", "runner.max_steps=1")
    says("waits", "waiting for accelerator 0 of node 0: runs/first-")
    first.kill()
    assert waits.wait() == 0
    says("waits", "finished")
