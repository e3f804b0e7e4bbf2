"""A job that learns from images of an arm's cameras and of demonstrations, and reports what they saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

JOB = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {{node_group: node, placement: 0}}
    env: {{node_group: arms, placement: 0}}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware: {{type: Franka, configs: [{{node_rank: 0, robot_ip: {arm.robot_ip}, robot_port: {arm.robot_port}}}]}}
data: {{train_data_paths: demonstrations}}
env:
  train:
    env_type: franka_robot
    total_num_envs: 1
    max_episode_steps: 10
    max_steps_per_rollout_epoch: 10
    intervention: {{source: "pusher:Pusher"}}
    options:
      cameras:
        scene: {{source: scene, view: drawing, width: 32, height: 32}}
        tape: {{source: file, path: pictures, width: 16, height: 16}}
  eval: {{rollout_epoch: 1, video_cfg: {{save_video: true}}}}
actor: {{global_batch_size: 16, model: {{model_type: squashed_policy, hidden_dim: 16}}}}
algorithm: {{loss_type: sac, learning_starts: 10, replay: {{demonstrations_share: 0.5}}}}
runner: {{max_steps: 2, val_check_interval: 2, logger: {{log_path: runs}}}}
"""
PUSHER = """
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.interventions.source_options import PersonOptions


class Pusher(PersonSource):
    def __init__(self, env, options):
        super().__init__(env, PersonOptions())

    def poll(self):
        return Controls((0.3, 0, 0))
"""
REPOSITORY = Path(__file__).parents[4]


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_learning_from_cameras_and_demonstrations(start_arm: Any, tmp_path: Path) -> None:
    arm, _ = start_arm(speed=20)
    (tmp_path / "job.yaml").write_text(JOB.format(arm=arm))
    (tmp_path / "pusher.py").write_text(PUSHER)
    (tmp_path / "pictures").mkdir()
    for number in range(5):
        Image.fromarray(np.full((48, 64, 3), 50 * number, np.uint8)).save(tmp_path / "pictures" / f"{number}.png")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RLINF_ADDRESS": "local"}

    def rlinf(*arguments: str) -> str:
        command = [sys.executable, "-m", "rlinf_cli", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rlinf("record", "job.yaml", "--device", "pusher:Pusher", "-o", "demonstrations", "-n", "2")
    rlinf("train", "job.yaml")
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    named = {name for line in lines for name in (line.get("metrics") or line)}
    assert {"env/frame_age/scene", "env/frame_age/tape", "env/state_age"} <= named
    assert list((folder / "videos").glob("*.mp4"))
    rlinf("report", str(folder))
    assert "<video" in (folder / "report.html").read_text(encoding="utf-8")
