"""A job on two arms from file to finish, with a worker killed on the way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.robots.controller_client import FrankaClient

JOB = """
recipe: embodied
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
          - {{node_rank: 0, robot_ip: {first.robot_ip}, robot_port: {first.robot_port}}}
          - {{node_rank: 0, robot_ip: {second.robot_ip}, robot_port: {second.robot_port}}}
actor:
  global_batch_size: 40
  model: {{hidden_dim: 16}}
env:
  train: {{env_type: franka_robot, total_num_envs: 2, max_episode_steps: 20, max_steps_per_rollout_epoch: 20}}
runner: {{max_steps: 5, val_check_interval: 5, max_restarts: 1, logger: {{log_path: runs}}}}
"""
TRAIN = """
from recipes.embodied.program import program
from rlinf_core.job.load import load_job
from rlinf_core.runners.events import RunFinished, RunRestarted, StepFinished
from rlinf_core.runners.storage.run_folder import RunFolder


def tell(event):
    if isinstance(event, StepFinished | RunRestarted | RunFinished):
        print(type(event).__name__, flush=True)


job = load_job("job.yaml")
assert job.ok, job.diagnostics
program(job, RunFolder.create(job.config.runner, "embodied"), tell)
"""
REPOSITORY = Path(__file__).parents[4]


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_job_goes_on_after_a_worker_with_an_arm_was_killed(start_arm: Any, tmp_path: Path) -> None:
    (first, _), (second, controller) = (start_arm(host=host, speed=50) for host in ("127.0.0.1", "127.0.0.2"))
    (tmp_path / "job.yaml").write_text(JOB.format(first=first, second=second))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", TRAIN],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as driver,
    ):
        try:
            output: list[str] = []
            killed = ""
            for line in driver.stdout or ():
                output.append(line.strip())
                if not killed and output[-1] == "StepFinished":
                    with FrankaClient(second) as watcher:
                        killed = re.findall(r"process (\d+) on", str(watcher.state().holder))[0]
                    os.kill(int(killed), signal.SIGKILL)
            assert driver.wait(120) == 0, (tmp_path / "errors").read_text()
        finally:
            driver.kill()
    events = [line for line in output if line.isalpha()]
    assert events.count("RunRestarted") == 1
    assert events[-1] == "RunFinished"
    assert events[-6:-1] == ["StepFinished"] * 5
    controller.kill()
    log = controller.communicate()[1]
    assert "safe stop: the holder's link was lost" in log
