"""Env workers that each own an arm: from the file, through placement, to the robot."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.real.franka_robot import FrankaRobotEnv
from recipes.embodied.envs.registry import make_env
from recipes.embodied.robots.controller_client import FrankaClient
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.load import load_job
from rlinf_core.placement.component import HybridComponentPlacement
from rlinf_core.worker.worker import Worker
from tests.waiting import until

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
          - {{node_rank: 0, robot_ip: $SECOND_ARM, robot_port: {second.robot_port}}}
      env_configs:
        - {{node_ranks: 0, env_vars: [{{SECOND_ARM: {second.robot_ip}}}]}}
actor:
  global_batch_size: 100
env:
  train: {{env_type: franka_robot, task: reach, total_num_envs: 2}}
"""


class ArmWorker(Worker):
    """What an env worker does with its arm."""

    def __init__(self) -> None:
        super().__init__()
        settings = EnvSettings(num_envs=1, first_env=self._rank, hardware=self.worker_info.hardware)
        self.env = make_env("franka_robot", settings)

    def owns(self) -> tuple[str, int]:
        (arm,) = self.worker_info.hardware
        return arm.robot_ip, os.getpid()  # type: ignore[attr-defined]

    def work(self, steps: int) -> np.ndarray:
        assert isinstance(self.env, FrankaRobotEnv)
        self.env.reset()
        for _ in range(steps):
            self.env.step(np.full((1, 1, 7), 0.1 * (self._rank + 1), np.float32))
        return self.env._joints[:, 0]


@pytest.mark.ray
def test_two_workers_drive_two_arms_and_a_death_stops_one(cluster: Cluster, start_arm: Any) -> None:
    arms = [start_arm(host=host, speed=1000)[0] for host in ("127.0.0.1", "127.0.0.2")]
    job = load_job("-", stdin=JOB.format(first=arms[0], second=arms[1]).encode(), environ={})
    assert job.ok, job.diagnostics
    robots = Cluster(cluster_cfg=job.config)
    strategy = HybridComponentPlacement(job.config, robots).get_strategy("env")
    group = ArmWorker.create_group().launch(robots, strategy, name="arm_workers")
    watchers = [FrankaClient(arm) for arm in arms]
    try:
        owners = group.owns().wait()
        assert [ip for ip, _ in owners] == ["127.0.0.1", "127.0.0.2"]
        for (_, pid), watcher in zip(owners, watchers, strict=True):
            assert str(watcher.state().holder).startswith(f"process {pid} on ")
        joints = group.work(3).wait()
        for watcher, expected in zip(watchers, joints, strict=True):
            np.testing.assert_allclose(watcher.state().joints, expected)
        assert not np.allclose(*joints)

        os.kill(owners[1][1], signal.SIGKILL)
        until(lambda: watchers[1].state().stopped is not None, "a stop of the dead owner's arm")
        assert f"process {owners[1][1]}" in str(watchers[1].state().stopped)
        assert watchers[0].state().stopped is None
        (again,) = group.execute_on(0).work(3).wait()
        np.testing.assert_allclose(watchers[0].state().joints, again)
        with pytest.raises((WorkerDiedError, WorkerGroupError)):
            group.execute_on(1).work(1).wait()
    finally:
        for watcher in watchers:
            watcher.close()
        group.shutdown()
    with FrankaClient(arms[0]) as watcher:  # the end of a group ends its leases
        until(lambda: watcher.state().holder is None, "the end of the lease")
