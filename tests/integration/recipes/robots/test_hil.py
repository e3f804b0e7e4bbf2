"""The shipped `franka_hil` on two simulated arms: its own settings, on one machine, for a few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.replay.segments import read_segments
from tests.every_third import steered

# Both arms get their address from the environment of their node; the person of each intervenes in every third step.
JOB = """
extends: {base}
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {{node_group: node, placement: 0}}
    env: {{node_group: arms, placement: 0-1}}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware:
        type: Franka
        configs:
          - {{node_rank: 0, robot_ip: $LEFT_ARM, robot_port: {left.robot_port}}}
          - {{node_rank: 0, robot_ip: $RIGHT_ARM, robot_port: {right.robot_port}}}
      env_configs:
        - {{node_ranks: 0, env_vars: [{{LEFT_ARM: {left.robot_ip}}}, {{RIGHT_ARM: {right.robot_ip}}}]}}
data: {{train_data_paths: null}}
env:
  train:
    intervention: {{source: "tests.every_third:EveryThird"}}
    max_episode_steps: 15
    max_steps_per_rollout_epoch: 15
actor: {{global_batch_size: 32, model: {{hidden_dim: 32}}}}
algorithm: {{learning_starts: 60}}
runner: {{max_steps: 4, val_check_interval: -1, save_interval: 4, logger: {{log_path: runs}}}}
"""
REPOSITORY = Path(__file__).parents[4]


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_arms_with_a_person_each_feed_one_learner(start_arm: Any, tmp_path: Path) -> None:
    left, right = (start_arm(host=host, speed=50)[0] for host in ("127.0.0.1", "127.0.0.2"))
    base = REPOSITORY / "configs" / "franka_hil.yaml"
    (tmp_path / "job.yaml").write_text(JOB.format(base=base, left=left, right=right))
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "train", "job.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RLINF_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])["metrics"]
    # Two updates for each step after the first 60, of 120 in all; five of the fifteen steps of a pass are a person's.
    assert last["train/updates"] == 120
    assert last["replay/online"] == 120
    assert last["env/intervened"] == pytest.approx(1 / 3)
    recorded = list(read_segments(tmp_path / "recordings" / "franka_hil" / "0"))
    assert sum(int(item["valid"].sum()) for item in recorded) == 120
    # Tick by tick: who moved which arm is what the person of that arm did in that step of the episode.
    flags = np.concatenate([item["interventions"] for item in recorded])
    truth = np.stack([steered(np.arange(15), env) for env in range(2)], axis=1)
    assert np.array_equal(flags, np.tile(truth, (4, 1)))
