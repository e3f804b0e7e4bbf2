"""A leader arm as the device of a person, over a fake of lerobot's bus."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.real.so101 import SO101Driver
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.intervention import InterventionError, SuccessJudge
from recipes.embodied.interventions.registry import open_judge, open_source
from recipes.embodied.interventions.source_options import LeaderOptions
from recipes.embodied.robots.so101_bus import LeaderSource
from rlinf_core import ConfigError
from rlinf_core.hardware.robots.plugin_driven import SO101
from tests.unit.recipes.embodied.robots import fake_motors
from tests.unit.recipes.embodied.robots.fake_motors import FeetechMotorsBus


@pytest.fixture(autouse=True)
def _lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_motors.install(monkeypatch)
    monkeypatch.setattr(SO101Driver, "control_hz", 2000.0)


@pytest.fixture
def env() -> Any:
    arm = SO101(node_rank=0, device="/dev/arm", options={"noise": 0, "lead": 90})
    made = make_env("robot", EnvSettings(num_envs=1, hardware=(arm,), max_episode_steps=10_000))
    made.reset()
    yield made
    made.close()


def leader(env: Any, **options: Any) -> LeaderSource:
    made = LeaderSource(env, LeaderOptions(device="/dev/leader", **options))
    FeetechMotorsBus.made[-1].at.update(dict.fromkeys(fake_motors.JOINTS, 0.0), gripper=50.0)
    while made.read() is not None:  # it was turned to the arm's pose
        pass
    return made


def turn(joint: str, by: float) -> None:
    """Turn a joint of the leader by hand."""
    FeetechMotorsBus.made[-1].at[joint] += by


def step(env: Any, source: LeaderSource) -> Any:
    """Take a step as an environment with this source does; the policy would stand still."""
    takeover = source.read()
    action = np.zeros((1, 1, 6), np.float32) if takeover is None else takeover.actions[:, None]
    env.step(action)
    return takeover


def test_arm_follows_the_leader_and_the_policy_acts_after_it(env: Any) -> None:
    source = leader(env, release_steps=3)
    assert not FeetechMotorsBus.made[-1].torque  # it is moved by hand
    turn("shoulder_pan", 5)
    turn("gripper", 10)
    taken = [step(env, source) is not None for _ in range(400)]
    last = len(taken) - taken[::-1].index(True)
    assert all(taken[:last])
    assert not any(taken[last:])
    goals = FeetechMotorsBus.made[0].goal
    assert goals["shoulder_pan"] == pytest.approx(5, abs=1.1)
    assert goals["gripper"] == pytest.approx(60, abs=1.1)


def test_a_joint_that_is_not_moved_stays_where_the_arm_has_it(env: Any) -> None:
    source = leader(env)
    for _ in range(200):
        env.step(np.array([[[0, 0, 0, 0, 0, -1]]], np.float32))  # the policy closes the gripper on something
    held = FeetechMotorsBus.made[0].goal["gripper"]
    turn("gripper", held + 10 - FeetechMotorsBus.made[-1].at["gripper"])
    source.read()
    source._engagement.begin()
    turn("shoulder_pan", 5)
    taken = [step(env, source) is not None for _ in range(300)]
    assert any(taken)
    assert FeetechMotorsBus.made[0].goal["shoulder_pan"] == pytest.approx(5, abs=1.1)
    assert FeetechMotorsBus.made[0].goal["gripper"] == pytest.approx(held, abs=0.2)
    turn("gripper", 5)
    for _ in range(400):
        step(env, source)
    assert FeetechMotorsBus.made[0].goal["gripper"] == pytest.approx(held + 15, abs=1.1)


def test_leader_far_from_the_arm_does_not_take_over(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = leader(env, align=10)
    turn("elbow_flex", 40)
    assert source.read() is None
    assert "leader arm at /dev/leader is too far" in caplog.text
    assert "elbow_flex by -40" in caplog.text
    turn("elbow_flex", -35)
    assert source.read() is not None
    turn("elbow_flex", 60)  # who is in charge may be as fast as they like
    assert source.read() is not None


def test_unplugged_leader_is_named(env: Any) -> None:
    source = leader(env)
    FeetechMotorsBus.made[-1].gone = True
    with pytest.raises(InterventionError, match="leader arm at /dev/leader: the arm's motors do not answer") as caught:
        source.read()
    assert "cable" in str(caught.value.help)
    source.close()
    with pytest.raises(InterventionError, match="do not answer"):
        LeaderSource(env, LeaderOptions(device="/dev/missing"))


def test_other_robots_have_no_leader() -> None:
    other = make_env("franka_kin", EnvSettings(num_envs=1))
    with pytest.raises(ConfigError, match="moves an SO-101, which this robot is not"):
        open_source("leader", other, {"device": "/dev/leader"})


def test_keys_judge_beside_a_leader_without_keys(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.intervention = leader(env)
    opened: list[str] = []

    class Keys:
        def read(self) -> Any:
            return None

        def close(self) -> None:
            pass

    monkeypatch.setattr(
        "recipes.embodied.interventions.registry.open_source", lambda name, *_: opened.append(name) or Keys()
    )
    judge: SuccessJudge = open_judge("keys", env, {})
    assert judge.judge({}) == {}
    assert opened == ["keyboard"]
    judge.close()
