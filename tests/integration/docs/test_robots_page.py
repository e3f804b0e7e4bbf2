"""The page of robots: its driver keeps the promises of drivers, and a job moves its robot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.nightly
@pytest.mark.ray
def test_the_robot_of_the_page_is_trained(follow_page: Callable[..., str], tmp_path: Path) -> None:
    assert follow_page("robots.md") == ""
    command = [sys.executable, "-m", "rlinf_cli", "train", "my_robot.yaml", "runner.logger.log_path=runs"]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "RLINF_ADDRESS": "local"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout + done.stderr
