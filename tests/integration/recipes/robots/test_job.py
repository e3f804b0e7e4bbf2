"""Jobs on simulated arms: from the file to the robot, with cameras, by a person, and where they listen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.real.franka_robot import FrankaRobotEnv
from recipes.embodied.envs.registry import make_env
from recipes.embodied.off_policy.segments import read_segments
from recipes.embodied.robots.controller_client import FrankaClient
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.load import load_job
from rlinf_core.placement.component import HybridComponentPlacement
from rlinf_core.worker.worker import Worker
from tests.every_third import steered
from tests.integration.recipes.robots.standing import job_of
from tests.listeners import ALWAYS, compared, names_of_job
from tests.rlinf_command import OURS, last_metrics, rlinf
from tests.waiting import until

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
EPISODE = {"env_type": "franka_robot", "max_episode_steps": 20, "max_steps_per_rollout_epoch": 20}
LOGS = {"log_path": "runs"}


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_job_goes_on_after_a_worker_with_an_arm_was_killed(start_arm: Any, tmp_path: Path) -> None:
    (first, _), (second, controller) = (start_arm(host=host, speed=50) for host in ("127.0.0.1", "127.0.0.2"))
    job = job_of(
        first,
        second,
        actor={"global_batch_size": 40, "model": {"hidden_dim": 16}},
        env={"train": {**EPISODE, "total_num_envs": 2}},
        runner={"max_steps": 5, "val_check_interval": 5, "max_restarts": 1, "logger": LOGS},
    )
    (tmp_path / "job.yaml").write_text(job)
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
    text = job_of(
        *arms,
        addresses=[arms[0].robot_ip, "$SECOND_ARM"],
        node_group={"env_configs": [{"node_ranks": 0, "env_vars": [{"SECOND_ARM": arms[1].robot_ip}]}]},
        actor={"global_batch_size": 100},
        env={"train": {"env_type": "franka_robot", "task": "reach", "total_num_envs": 2}},
    )
    job = load_job("-", stdin=text.encode(), environ={})
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


PUSHER = """
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.config.intervention_types import PersonOptions


class Pusher(PersonSource):
    def __init__(self, env, options):
        super().__init__(env, PersonOptions())

    def poll(self):
        return Controls((0.3, 0, 0))
"""


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_learning_from_cameras_and_demonstrations(start_arm: Any, tmp_path: Path) -> None:
    arm, _ = start_arm(speed=20)
    cameras = {
        "scene": {"source": "scene", "view": "drawing", "width": 32, "height": 32},
        "tape": {"source": "file", "path": "pictures", "width": 16, "height": 16},
    }
    sizes = {"total_num_envs": 1, "max_episode_steps": 10, "max_steps_per_rollout_epoch": 10}
    seen = {"intervention": {"source": "pusher:Pusher"}, "options": {"cameras": cameras}}
    job = job_of(
        arm,
        data={"train_data_paths": "demonstrations"},
        env={
            "train": {"env_type": "franka_robot", **sizes, **seen},
            "eval": {"rollout_epoch": 1, "video_cfg": {"save_video": True}},
        },
        actor={"global_batch_size": 16, "model": {"model_type": "squashed_policy", "hidden_dim": 16}},
        algorithm={"loss_type": "sac", "learning_starts": 10},
        runner={"max_steps": 2, "val_check_interval": 2, "logger": LOGS},
    )
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "pusher.py").write_text(PUSHER)
    (tmp_path / "pictures").mkdir()
    for number in range(5):
        Image.fromarray(np.full((48, 64, 3), 50 * number, np.uint8)).save(tmp_path / "pictures" / f"{number}.png")
    environ = os.environ | OURS
    record = ("record", "job.yaml", "--device", "pusher:Pusher", "-o", "demonstrations", "-n", "2")
    rlinf(tmp_path, *record, env=environ)
    rlinf(tmp_path, "train", "job.yaml", env=environ)
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    named = {name for line in lines for name in (line.get("metrics") or line)}
    assert {"env/frame_age/scene", "env/frame_age/tape", "env/state_age"} <= named
    assert list((folder / "videos").glob("*.mp4"))
    rlinf(tmp_path, "report", str(folder), env=environ)
    assert "<video" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_arms_with_a_person_each_feed_one_learner(start_arm: Any, tmp_path: Path) -> None:
    left, right = (start_arm(host=host, speed=50)[0] for host in ("127.0.0.1", "127.0.0.2"))
    base = REPOSITORY / "configs" / "embodied" / "franka-hil-2arms.yaml"
    # Both arms get their address from the environment of their node; each person intervenes in every third step.
    variables = [{"LEFT_ARM": left.robot_ip}, {"RIGHT_ARM": right.robot_ip}]
    person = {"intervention": {"source": "tests.every_third:EveryThird"}}
    job = job_of(
        left,
        right,
        addresses=["$LEFT_ARM", "$RIGHT_ARM"],
        extends=str(base),
        node_group={"env_configs": [{"node_ranks": 0, "env_vars": variables}]},
        data={"train_data_paths": None},
        env={"train": {**person, "max_episode_steps": 15, "max_steps_per_rollout_epoch": 15}},
        actor={"global_batch_size": 32, "model": {"hidden_dim": 32}},
        algorithm={"learning_starts": 60},
        runner={"max_steps": 4, "val_check_interval": -1, "save_interval": 4, "logger": LOGS},
    )
    (tmp_path / "job.yaml").write_text(job)
    rlinf(tmp_path, "train", "job.yaml", env=os.environ | OURS, timeout=250)
    last = last_metrics(tmp_path)["metrics"]
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


@pytest.mark.nightly
@pytest.mark.security
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_job_on_an_arm_with_its_controller(start_arm: Any, tmp_path: Path) -> None:
    arm, controller = start_arm(speed=50)
    job = job_of(
        arm,
        actor={"global_batch_size": 20, "model": {"hidden_dim": 16}},
        env={"train": {**EPISODE, "total_num_envs": 1}},
        runner={"val_check_interval": -1, "logger": LOGS},
    )
    (tmp_path / "job.yaml").write_text(job)
    assert names_of_job(tmp_path, "job.yaml") >= ALWAYS
    assert compared([controller.pid]) >= {"Simulated arm controller"}
