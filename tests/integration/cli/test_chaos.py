"""Faults by seed in the shipped recipes: every run ends right, or says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.chaos_jobs import JOBS

# A seed takes up to two minutes on a busy machine.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
_SEEDS = 20
GOOD = {"equal", "right", "explained", "untouched"}


def chaos(job: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return the records of the disturbed runs."""
    command = [sys.executable, "-m", "tests.chaos", *JOBS[job], "--folder", str(folder), "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    return json.loads(ended.stdout)["runs"]


@pytest.mark.parametrize("job", JOBS)
def test_every_run_ends_right_or_says_why(job: str, tmp_path: Path) -> None:
    runs = chaos(job, tmp_path / "chaos", "--seeds", str(_SEEDS), "--most", "6")
    assert [run["seed"] for run in runs] == list(range(_SEEDS))
    assert [run for run in runs if run["verdict"] not in GOOD] == []
    # Runs without staleness are compared with undisturbed ones, bit by bit.
    finished = {run["verdict"] for run in runs if run["status"] == "finished"}
    assert ("right" if job in ("ahead", "async") else "equal") in finished


def test_killed_worker_changes_no_bit(tmp_path: Path) -> None:
    (run,) = chaos("embodied", tmp_path / "chaos", "--seeds", "1", "--first-seed", "3", "--fault", "kill-worker")
    (strike,) = run["strikes"]
    assert (run["verdict"], bool(strike["victim"]), strike["told_after"] is not None) == ("equal", True, True)
