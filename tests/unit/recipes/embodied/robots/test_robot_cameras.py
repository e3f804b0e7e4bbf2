"""Cameras of arms and of robots of one's own: observed with the states, shown to a person, and a reason to stop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from recipes.demonstrations.demonstrations import joined
from recipes.demonstrations.lerobot.lerobot_set import read_lerobot
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.cameras.drivers import CameraError
from recipes.embodied.config.intervention_types import PersonOptions
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.robots import manual_control
from recipes.embodied.robots.controller.arm import SimulatedArm, SimulatedCameras
from recipes.embodied.robots.controller.controller import Controller
from recipes.embodied.robots.controller.controller_server import Server
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.using.collector import EpisodeCollector
from recipes.embodied.using.recording import features_of, to_columns
from rlinf_cli.main import main
from rlinf_core import ConfigError
from rlinf_core.hardware.franka import Franka
from rlinf_core.hardware.robots import GenericRobot
from tests.unit.recipes.embodied.cameras import fake_cameras
from tests.unit.recipes.embodied.cameras.fake_cameras import Steady
from tests.unit.recipes.embodied.robots.test_robot_driver import Slide
from tests.waiting import until

STEADY = {"source": f"{fake_cameras.__name__}:Steady", "width": 32, "height": 32}
DRAWING = {"source": "scene", "view": "drawing", "width": 64, "height": 32}
FILE = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {{node_group: node, placement: 0}}
    env: {{node_group: arms, placement: 0}}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware:
        type: Franka
        configs: [{{node_rank: 0, robot_ip: 127.0.0.1, robot_port: {port}}}]
actor: {{global_batch_size: 50, model: {{model_type: cnn_policy}}}}
env:
  train:
    env_type: franka_robot
    total_num_envs: 1
    options:
      cameras: {{tape: {{source: file, path: {pictures}, fps: 100}}, scene: {{source: scene, view: drawing}}}}
"""


class SeeingSlide(Slide):
    """A slide with a camera of its own."""

    control_hz = 1000.0

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(1, 1, cameras={"own": (8, 8, 3)})

    def observe(self) -> Mapping[str, NDArray[Any]]:
        return {**super().observe(), "images.own": np.full((8, 8, 3), 9, np.uint8)}


def _fast(_: FrankaClient, count: int) -> list[float]:
    return [0.001] * count


class Looker(PersonSource):
    """A person who pushes forward once, looks at the pictures, and is done."""

    seen: list[list[str]]

    def __init__(self, env: Any, options: Any) -> None:
        super().__init__(env, PersonOptions(release_steps=0))
        self.controls = [Controls((1, 0, 0)), Controls(), Controls(verdict="success")]

    def poll(self) -> Controls:
        Looker.seen.append([view.camera for view in self.env.views(0)])
        return self.controls.pop(0)


@pytest.fixture(autouse=True)
def _few_cameras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Steady.made, Slide.made = [], []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(FrankaClient, "latency", _fast)
    monkeypatch.setattr(manual_control, "SECONDS", 30.0)
    for name in ("WATCHDOG_SECONDS", "LATE_SECONDS"):
        monkeypatch.setattr(f"recipes.embodied.robots.controller.controller.{name}", 1000.0)


@pytest.fixture
def arm() -> Iterator[Franka]:
    """A fast arm whose controller reads no cameras, and listens on loopback as long as the test takes."""
    loop = asyncio.new_event_loop()
    server = Server(Controller(SimulatedArm(1000.0), SimulatedCameras()))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    host, port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result(30)
    yield Franka(node_rank=0, robot_ip=host, robot_port=port, camera_serials=("77",))
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def seen_by(arm: Franka, **cameras: Any) -> Any:
    options = {"cameras": {"front": {**STEADY, "serial": "77"}, **cameras}}
    return make_env("franka_robot", EnvSettings(num_envs=1, hardware=(arm,), options=options))


STILL = np.zeros((1, 1, 7), np.float32)


class TestArm:
    def test_images_are_observed_with_states(self, arm: Franka) -> None:
        env = seen_by(arm, scene=DRAWING)
        assert dict(env.spec.cameras) == {"front": (32, 32, 3), "scene": (32, 64, 3)}
        first = env.reset()
        assert np.unique(first["images.front"]).tolist() == [7]
        result = env.step(np.full((1, 1, 7), 0.5, np.float32))
        assert (result.observations["images.scene"] != first["images.scene"]).any()
        assert [(view.camera, view.image.shape) for view in env.views(0)] == [
            ("front", (48, 64, 3)),
            ("scene", (128, 256, 3)),
        ]
        figures = env.take_figures()
        assert set(figures) == {"state_age", "frame_age/front", "frame_age/scene"}
        assert all(total >= 0 and count > 0 for total, count in figures.values())
        assert env.look(np.arange(1)).keys() == {"images.front", "images.scene"}
        env.close()
        assert Steady.made[0].closed

    def test_point_can_be_left_to_the_pictures(self, arm: Franka) -> None:
        arm = arm.model_copy(update={"camera_serials": ()})
        settings = EnvSettings(num_envs=1, hardware=(arm,), seed=3)
        options = {"point_in_states": False, "lead_in_states": True}
        env: Any = make_env("franka_robot", replace(settings, options=options))
        assert env.spec.state_size == 17
        own = env.reset()["states"][:, :10]
        env.close()
        whole: Any = make_env("franka_robot", settings)
        np.testing.assert_allclose(whole.reset()["states"][:, :10], own, atol=1e-6)
        whole.close()

    def test_expert_reaches_the_point(self, arm: Franka) -> None:
        arm = arm.model_copy(update={"camera_serials": ()})
        settings = EnvSettings(num_envs=1, hardware=(arm,), max_episode_steps=20)
        env: Any = make_env("franka_robot", settings)
        env.reset()
        ends = [bool(env.step(env.expert()[:, None]).terminations.any()) for _ in range(20)]
        assert any(ends)
        env.close()

    def test_frozen_camera_stops_the_arm(self, arm: Franka) -> None:
        env = seen_by(arm, side={**STEADY, "max_age": 0.3})
        env.reset()
        Steady.made[1].frozen = True
        until(lambda: time.monotonic() - env.views(0)[1].taken > 0.3, "the frame is too old")
        with pytest.raises(CameraError, match=r"camera `side` has taken no frame for .*, so the robot was stopped"):
            env.step(STILL)
        with FrankaClient(arm) as watcher:
            assert watcher.state().stopped
        env.close()

    def test_training_and_evaluation_share_cameras(self, arm: Franka) -> None:
        train, evaluation = seen_by(arm), seen_by(arm)
        assert len(Steady.made) == 1
        with pytest.raises(ConfigError, match="different options of one arm"):
            seen_by(arm, scene=DRAWING)
        train.close()
        assert not Steady.made[0].closed
        evaluation.close()
        assert Steady.made[0].closed

    def test_absent_camera_leaves_the_arm_free(self, arm: Franka) -> None:
        with pytest.raises(CameraError, match="camera `side` has failed"):
            seen_by(arm, side={"source": f"{fake_cameras.__name__}:Absent"})
        with FrankaClient(arm) as client:
            assert client.state().holder is None
        assert Steady.made[0].closed


class TestOwnRobot:
    def make(self, **cameras: Any) -> Any:
        robot = GenericRobot(node_rank=0, address="/dev/slide0", driver=f"{__name__}:SeeingSlide")
        return make_env("robot", EnvSettings(num_envs=1, hardware=(robot,), options={"cameras": cameras}))

    def test_driver_and_cameras_both_see(self) -> None:
        env = self.make(front=STEADY)
        observed = env.reset()
        assert {name: array.shape for name, array in observed.items()} == {
            "states": (1, 1),
            "images.own": (1, 8, 8, 3),
            "images.front": (1, 32, 32, 3),
        }
        assert [view.camera for view in env.views(0)] == ["own", "front"]
        env.step(np.zeros((1, 1, 1), np.float32))
        assert set(env.take_figures()) == {"frame_age/front"}
        env.close()

    def test_recordings_have_the_age_of_every_frame(self, tmp_path: Path) -> None:
        shared = self.make(front=STEADY)
        env = make_env("robot", replace(shared.settings, max_episode_steps=4, auto_reset=False))
        shared.close()
        assert np.isnan(env.frame_ages()["front"]).all()
        collector, ages = EpisodeCollector(env, 0, "slide", "everything"), list[float]()
        while not collector.over:
            ages.append(float(env.frame_ages()["front"][0]))
            collector.step(np.zeros((1, 1, 1), np.float32))
        (episode,) = collector.episodes()
        features = features_of(env.spec, aged_cameras=list(env.frame_ages()))
        with DatasetWriter(tmp_path / "set", 20, features) as writer:
            writer.add(to_columns(episode, env.spec), episode.task)
        env.close()
        read = read_lerobot(tmp_path / "set")
        assert list(read.frame_ages) == ["front"]
        assert read.frame_ages["front"].tolist() == ages
        assert all(0 <= age < 60 for age in ages)
        assert joined([read, read]).chosen([1]).frame_ages["front"].tolist() == ages

    def test_two_cameras_of_one_name(self) -> None:
        with pytest.raises(ConfigError, match="two cameras are called `own`"):
            self.make(own=STEADY)

    def test_broken_camera_stops_the_robot(self) -> None:
        env = self.make(front=STEADY)
        env.reset()
        Steady.made[0].broken = True
        until(lambda: Steady.made[0].closed, "the reader has ended")
        with pytest.raises(CameraError, match="the cable is torn, so the robot was stopped"):
            env.step(np.zeros((1, 1, 1), np.float32))
        env.close()


def written(arm: Franka, folder: Path) -> str:
    """Return a file with two cameras of an arm: a recording, and its scene."""
    pictures, file = folder / "tape", folder / "job.yaml"
    pictures.mkdir()
    Image.fromarray(np.full((48, 64, 3), 50, np.uint8)).save(pictures / "0.png")
    file.write_text(FILE.format(port=arm.robot_port, pictures=pictures))
    return str(file)


def test_teleoperation_shows_the_cameras(arm: Franka, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Looker.seen = []
    assert main(["robot", "teleop", written(arm, tmp_path), "--device", f"{__name__}:Looker"]) == 0
    assert "moved for 1 control periods" in capsys.readouterr().out
    assert Looker.seen == [["tape", "scene"]] * 3


def test_cameras_by_hand(arm: Franka, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(arm, tmp_path)

    def said(*arguments: str) -> Any:
        assert main(["robot", *arguments, file, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    assert said("list")["robots"][0]["cameras"] == ["tape", "scene"]
    saved = tmp_path / "saved"
    assert main(["robot", "cameras", file, "--save", str(saved)]) == 0
    printed = capsys.readouterr()
    assert "64x48" in printed.out
    assert Image.open(saved / "tape.png").size == (64, 48)
    assert Image.open(saved / "scene.png").size == (256, 128)
    checks = {check["name"]: check for check in said("check")["checks"]}
    assert checks["cameras"]["verdict"] == "ok"
    assert "tape: 64x48" in checks["cameras"]["message"]
    (tmp_path / "tape" / "0.png").unlink()
    assert main(["robot", "check", file]) == 1
    assert "has no pictures" in capsys.readouterr().out
