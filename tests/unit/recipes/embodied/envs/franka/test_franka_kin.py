"""The kinematic arm, alone and under a camera: what moves, what is grasped, what is seen, what is rewarded."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.envs.env_spec import EnvSettings, StepResult
from recipes.embodied.envs.franka import franka_kin
from recipes.embodied.envs.franka.franka_kin import (
    COLORS,
    POINT_HEIGHT,
    SEEN_HIGH,
    SEEN_LOW,
    FrankaKinEnv,
    FrankaVisionEnv,
)
from recipes.embodied.robots import franka_arm
from recipes.embodied.robots.franka_arm import (
    CONTROL_SECONDS,
    JOINT_MAX,
    JOINT_MIN,
    SPEED,
    VELOCITY_MAX,
    distance,
    hand_pose,
)
from rlinf_core.errors import ConfigError
from tests.known import known

OPEN, CLOSE, STAY = -1.0, 1.0, 0.0


def arm(num_envs: int = 2, **settings: Any) -> FrankaKinEnv:
    env = FrankaKinEnv(EnvSettings(num_envs=num_envs, **settings))
    env.reset()
    return env


def move_to(env: FrankaKinEnv, where: np.ndarray, gripper: np.ndarray | float) -> StepResult:
    """Return one step toward a point [3, B], the hand pointing down: damped least squares on differences of the
    kinematics.
    """
    pose = np.concatenate(hand_pose(env._joints))
    jacobian = np.empty((6, 7, env.num_envs))
    for joint in range(7):
        nudged = env._joints.copy()
        nudged[joint] += 1e-5
        jacobian[:, joint] = (np.concatenate(hand_pose(nudged)) - pose) / 1e-5
    down = np.array([0.0, 0.0, -1.0])[:, None]
    error = np.concatenate((where - pose[:3], 0.3 * (down - pose[3:])))
    actions = np.empty((env.num_envs, 1, 8), np.float32)
    for row in range(env.num_envs):
        j = jacobian[:, :, row] * np.array([1, 1, 1, 0.3, 0.3, 0.3])[:, None]
        actions[row, 0, :7] = j.T @ np.linalg.solve(j @ j.T + 1e-3 * np.eye(6), error[:, row])
    actions[:, 0, :7] /= env._step_size[:, 0]
    largest = np.abs(actions[:, :, :7]).max(axis=2, keepdims=True)
    actions[:, :, :7] /= np.maximum(largest, 1)
    actions[:, 0, 7] = gripper
    return env.step(actions)


def test_a_scripted_arm_picks_the_block() -> None:
    """Down to the block with an open gripper, close, up: solved well within an episode, from 50 starts."""
    env = arm(50, max_episode_steps=50, auto_reset=False)
    solved = np.zeros(50, np.bool_)
    rewards = np.zeros(50)
    for _ in range(50):
        goal = np.stack((env._target[0], env._target[1], np.where(env._held, 0.4, env._target[2])))
        result = move_to(
            env, goal, np.where(env._held | (franka_arm.distance(env._target, env._hand) < 0.02), CLOSE, OPEN)
        )
        rewards += result.rewards[:, 0]
        solved |= env._episodes.success
    assert solved.all()
    assert (rewards > 3.5).all()


def test_what_the_block_needs_to_be_grasped() -> None:
    env = arm(4)
    env._target[:] = env._hand
    env._target[2, 1] -= 0.2  # too far
    env._axis[:, 2] = [1, 0, 0]  # not from above
    env._closed[3] = True  # closed before
    env._grip(np.full(4, CLOSE))
    assert env._held.tolist() == [True, False, False, False]
    assert env._closed.all()
    env._grip(np.full(4, STAY))
    assert env._held[0]
    env._grip(np.full(4, OPEN))
    assert not env._held.any()
    assert not env._closed.any()
    assert env._target[2, 0] == franka_kin.BLOCK_LOW[2]


def test_success_is_the_block_held_high() -> None:
    env = arm(3, max_episode_steps=10)
    env._held[:2] = env._closed[:2] = True
    env._hand[2] = [0.5, 0.1, 0.5]
    env._target[:, :2] = env._hand[:, :2]
    assert env._successes().tolist() == [True, False, False]
    result = env.step(np.zeros((3, 1, 8), np.float32))  # the hand returns to where the joints put it: all are high
    assert result.terminations[:, 0].tolist() == [True, True, False]
    assert result.rewards[0, 0] > 0.9
    assert result.episodes is not None
    assert known(result.episodes.success_at_end).tolist() == [True, True]


@pytest.mark.parametrize("task", ["pick", "reach"])
def test_joints_keep_their_limits_and_speeds(task: str) -> None:
    env = arm(64, task=task, max_episode_steps=1000, ignore_terminations=True)
    random = np.random.default_rng(0)
    for _ in range(200):
        before = env._joints.copy()
        env.step(random.normal(scale=5, size=(64, 1, env.spec.action_size)).astype(np.float32))
        assert (env._joints >= JOINT_MIN[:, None]).all()
        assert (env._joints <= JOINT_MAX[:, None]).all()
        limit = VELOCITY_MAX * CONTROL_SECONDS * SPEED + 1e-12
        assert (np.abs(env._joints - before) <= limit[:, None]).all()
        assert (env._hand[2] > 0).all()
        np.testing.assert_allclose(env._hand, hand_pose(env._joints)[0], atol=1e-12)


def test_the_hand_stops_at_the_table() -> None:
    env = arm(1, max_episode_steps=1000)
    for _ in range(60):
        below = env._hand.copy()
        below[2] = -1.0
        move_to(env, below, STAY)
    assert 0 < env._hand[2, 0] < 0.06


@given(st.integers(0, 2**32 - 1))
def test_starts_are_where_they_should_be(seed: int) -> None:
    pick, reach = arm(16, seed=seed), arm(16, seed=seed, task="reach")
    assert ((pick._target.T >= franka_kin.BLOCK_LOW) & (pick._target.T <= franka_kin.BLOCK_HIGH)).all()
    assert ((reach._target.T >= franka_arm.POINT_LOW) & (reach._target.T <= franka_arm.POINT_HIGH)).all()
    assert not pick._successes().any()
    assert not pick._held.any()
    assert (np.abs(pick._joints - franka_kin.HOME[:, None]) <= franka_arm.HOME_NOISE).all()


@given(st.integers(0, 1000), st.sampled_from(["pick", "reach"]))
def test_rewards_add_up_to_what_was_gained(seed: int, task: str) -> None:
    """A sum of differences: the potential at the end less that at the start, and 1 for each solved state."""
    env = arm(8, task=task, seed=seed, max_episode_steps=20, ignore_terminations=True, auto_reset=False)
    before = env._potential_now()
    random = np.random.default_rng(seed)
    total, solved = np.zeros(8), np.zeros(8)
    for _ in range(15):
        result = env.step(random.normal(size=(8, 1, env.spec.action_size)).astype(np.float32))
        total += result.rewards[:, 0]
        solved += env._successes()
    np.testing.assert_allclose(total, env._potential_now() - before + solved, atol=1e-4)


@pytest.mark.parametrize("task", ["pick", "reach"])
def test_observations_are_about_the_size_of_one(task: str) -> None:
    env = arm(64, task=task)
    random, largest = np.random.default_rng(0), 0.0
    for _ in range(100):
        result = env.step(random.normal(size=(64, 1, env.spec.action_size)).astype(np.float32))
        states = result.observations["states"]
        assert states.shape == (64, env.spec.state_size)
        assert states.dtype == np.float32
        largest = max(largest, float(np.abs(states).max()))
    assert 1 < largest < 15
    assert result.observations["instructions"].tolist() == [franka_kin.INSTRUCTIONS[task]] * 64


@pytest.mark.parametrize(("given_", "named"), [({"task": "pull"}, "pull"), ({"options": {"colour": 1}}, "colour")])
def test_what_it_does_not_have_is_refused(given_: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)`{named}`.*`pick` and `reach`"):
        arm(**given_)


def test_it_is_fast() -> None:
    """Hundreds of thousands of steps in a CPU second with 256 environments; a tenth of what was measured is asked."""
    env = arm(256)
    actions = np.random.default_rng(0).normal(size=(256, 1, 8)).astype(np.float32)
    begun = time.process_time()
    for _ in range(200):
        env.step(actions)
    assert 200 * 256 / (time.process_time() - begun) > 100_000


@pytest.mark.parametrize("task", ["pick", "reach"])
def test_the_expert_solves_it(task: str) -> None:
    env = arm(64, task=task, auto_reset=False)
    for _ in range(50):
        env.step(env.expert()[:, None])
    assert env._episodes.success_once.all()


def seeing(num_envs: int = 16, **settings: Any) -> FrankaVisionEnv:
    env = FrankaVisionEnv(EnvSettings(num_envs=num_envs, auto_reset=False, **settings))
    env.reset()
    return env


def test_the_expert_touches_the_named_point() -> None:
    env = seeing(64)
    for _ in range(16):
        env.step(env.expert()[:, None])
    assert env._episodes.success_once.all()


def test_the_named_point_is_where_the_picture_shows_its_colour() -> None:
    env = seeing(options={"points": 3, "image_size": 64})
    seen = env.observe()
    assert seen["images.main"].shape == (16, 64, 64, 3)
    assert seen["images.main"].dtype == np.uint8
    for row, text in enumerate(seen["instructions"]):
        color = np.array(COLORS[str(text).split()[2]])
        line, column = np.nonzero((np.abs(seen["images.main"][row].astype(int) - color) < 3).all(axis=-1))
        share = (np.stack((line.mean(), column.mean())) + 0.5) / 64
        place = SEEN_HIGH - (SEEN_HIGH - SEEN_LOW) * share
        # The hand and the arm may cover a part of it.
        np.testing.assert_allclose(place, env._target[:2, row], atol=0.03)
    assert (env._target[2] == POINT_HEIGHT).all()


def test_states_say_nothing_of_points_and_instructions_vary() -> None:
    env, other = seeing(group_size=16), seeing(group_size=16)
    other._places += 0.1
    np.testing.assert_array_equal(env.observe()["states"], other.observe()["states"])
    assert set(seeing(64).observe()["instructions"]) == {"touch the red point", "touch the blue point"}


def test_the_other_point_is_no_success() -> None:
    env = seeing(64)
    env._named = 1 - env._named
    wrong = env._target.copy()
    env._named = 1 - env._named
    for _ in range(16):
        way = (wrong - env._hand) / 0.04
        env.step(np.clip(way, -1, 1).T.astype(np.float32)[:, None])
    assert env._episodes.success_once.mean() < 0.1


def test_rewards_are_the_way_to_the_named_point_and_success() -> None:
    env = seeing(64)
    before = distance(env._target, env._hand)
    result = env.step(np.random.default_rng(0).uniform(-1, 1, (64, 1, 3)).astype(np.float32))
    after = distance(env._target, env._hand)
    np.testing.assert_allclose(result.rewards[:, 0], 10 * (before - after) + (after < 0.05), atol=1e-5)


@pytest.mark.parametrize("options", [{"points": 9}, {"points": 0}, {"image_size": 2}])
def test_what_cannot_be_drawn_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"options.{next(iter(options))}`"):
        seeing(options=options)
