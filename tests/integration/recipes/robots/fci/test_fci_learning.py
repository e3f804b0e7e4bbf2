"""From scripted demonstrations to a policy over Franka's control interface, against a public server; see `fci_rig.py`.

How well it learns is not tested here: that takes thousands of actions in real time. docs/results.md has the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.hardware.robots.franka import Franka
from tests.integration.recipes.robots.fci.fci_rig import NEEDS_FCI, ROOT

pytestmark = [*NEEDS_FCI, pytest.mark.ray, pytest.mark.timeout(900)]
Control = Callable[..., tuple[Franka, subprocess.Popen[str]]]
EPISODES = 3


@pytest.mark.parametrize("patient", [True], indirect=True)
def test_demonstrations_become_a_policy(patient: bool, control: Control, tmp_path: Path) -> None:
    assert patient
    arm, _ = control()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RLINF_ADDRESS": "local"}
    overrides = [
        f"cluster.node_groups[0].hardware.configs[0].robot_port={arm.robot_port}",
        "env.eval.rollout_epoch=1",
    ]

    def rlinf(*arguments: str) -> None:
        command = [sys.executable, "-m", "rlinf_cli", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    demonstrations = ("-o", "demonstrations/reach", "-n", str(EPISODES), "--successes-only")
    rlinf("record", "franka_real", *overrides, *demonstrations)
    short = ["runner.max_steps=3", "runner.val_check_interval=3", "runner.save_interval=3"]
    rlinf("train", "franka_real", *overrides, *short, "runner.logger.log_path=runs")
    (folder,) = (tmp_path / "runs").iterdir()
    metrics: dict[str, Any] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics |= json.loads(line)["metrics"]
    assert metrics["replay/demonstrations"] >= EPISODES
    assert metrics["train/updates"] == 4 * (3 * 50 - 100)
    rlinf("eval", str(folder))
