"""A job on an arm and the arm's controller listen only where docs/clusters.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.listeners import ALWAYS, compared, names_of_job

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
actor: {{global_batch_size: 20, model: {{hidden_dim: 16}}}}
env:
  train:
    env_type: franka_robot
    total_num_envs: 1
    max_episode_steps: 20
    max_steps_per_rollout_epoch: 20
runner: {{val_check_interval: -1, logger: {{log_path: runs}}}}
"""


@pytest.mark.nightly
@pytest.mark.security
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_job_on_an_arm_with_its_controller(start_arm: Any, tmp_path: Path) -> None:
    arm, controller = start_arm(speed=50)
    (tmp_path / "job.yaml").write_text(JOB.format(arm=arm))
    assert names_of_job(tmp_path, "job.yaml") >= ALWAYS
    assert compared([controller.pid]) >= {"Simulated arm controller"}
