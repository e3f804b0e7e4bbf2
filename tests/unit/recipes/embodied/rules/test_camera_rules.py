"""`options.cameras` of robots in a file: what cannot be opened on a robot is found before anything runs."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from recipes.embodied.rules import camera_rules
from tests.unit.recipes.embodied.cameras.fake_cameras import lacking

JOB = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {node_group: node, placement: 0}
    env: {node_group: arms, placement: 0}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1, ROBOT}]}
actor: {global_batch_size: 50, model: {model_type: MODEL}}
env:
  train: {env_type: franka_robot, total_num_envs: 1, options: {cameras: CAMERAS}}
  EVAL
"""
FILE = "{source: file, path: film.mp4}"
TWO = 'camera_serials: ["1", "2"]'


def job(cameras: str, robot: str = "disable_validate: true", *, model: str = "cnn_policy", evaluation: str = "") -> str:
    text = JOB.replace("ROBOT", robot).replace("CAMERAS", cameras).replace("MODEL", model)
    return text.replace("EVAL", evaluation)


@pytest.fixture(autouse=True)
def _every_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camera_rules, "missing_modules", lacking())


@pytest.mark.parametrize(
    ("cameras", "robot"),
    [
        (f"{{front: {FILE}}}", "disable_validate: true"),
        ("{front: {}, wrist: {width: 64}}", TWO),
        ("{front: {source: v4l2}, view: {source: scene, view: drawing}, wrist: {}}", TWO),
        ('{front: {serial: "7"}}', "disable_validate: true"),
    ],
)
def test_sound_cameras(findings: Any, cameras: str, robot: str) -> None:
    assert findings(job(cameras, robot)) == []


@pytest.mark.parametrize(
    ("cameras", "robot", "code", "words"),
    [
        ("{front: {}}", "disable_validate: true", "conflicting-settings", "`front` has no serial number"),
        ("{front: {}}", TWO, "conflicting-settings", "takes the serial number 2"),
        (
            "{front: {}}",
            TWO + ", camera_type: zed",
            "conflicting-settings",
            "no driver for cameras of `camera_type: zed`",
        ),
        ("{front: {source: webcam}}", "disable_validate: true", "unknown-choice", "there is no source `webcam`"),
        ("{front: {source: file}}", "disable_validate: true", "bad-value", "needs a `path`"),
        ("{front: {source: scene, path: x}}", "disable_validate: true", "bad-value", "`path` has no effect"),
        ("{front: {source: scene, widht: 8}}", "disable_validate: true", "unknown-key", "did you mean `width`?"),
        ("{front: {source: scene, width: 1}}", "disable_validate: true", "bad-value", "`width` must be at least 8"),
        ("{two words: {source: scene}}", "disable_validate: true", "bad-value", "`two words` cannot name a camera"),
        ("{front: {source: 'nowhere_at_all:Eye'}}", "disable_validate: true", "missing-extra", "nowhere_at_all"),
        ("{front: {source: scene, crop: [9, 0, 9, 5]}}", "disable_validate: true", "bad-value", "`crop` is empty"),
    ],
)
def test_cameras_that_cannot_be(findings: Any, cameras: str, robot: str, code: str, words: str) -> None:
    reported = findings(job(cameras, robot, model="squashed_policy"), messages=True)
    assert code in [item[0] for item in reported]
    assert words in " ".join(str(text) for item in reported for text in item[1:])


def test_policy_without_cameras_is_told(findings: Any) -> None:
    assert ("conflicting-settings", "cnn_policy") in findings(job("{}"))


def test_evaluation_has_the_same_cameras(findings: Any) -> None:
    other = f"eval: {{options: {{cameras: {{side: {FILE}}}}}}}"
    reported = findings(job(f"{{front: {FILE}}}", evaluation=other), messages=True)
    assert any("different cameras" in str(text) for item in reported for text in item)


def test_missing_package_is_named(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camera_rules, "missing_modules", lacking("cv2"))
    (reported,) = findings(job("{front: {source: v4l2, path: /dev/video0}}"), messages=True)
    assert reported[0] == "missing-extra"
    assert "rlinf-cli[cameras]" in str(reported)


def test_checking_cameras_imports_nothing_heavy(findings: Any) -> None:
    before = set(sys.modules)
    assert findings(job("{front: {source: scene}}")) == []
    assert not {"mujoco", "cv2", "pyrealsense2", "torch"} & (set(sys.modules) - before)
