"""The arm in MuJoCo: the same arm as the kinematic one, with contacts; solvable, and one history for one seed."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.envs.franka_kin import FrankaKinEnv
from recipes.embodied.envs.types import EnvSettings
from recipes.embodied.robots.franka_arm import ACTION_STEP, REACH_INSTRUCTION, distance
from recipes.embodied.robots.franka_kinematics import JOINT_MAX, JOINT_MIN, hand_pose
from rlinf_core.errors import ConfigError

mujoco = pytest.importorskip("mujoco", reason="the extra `mujoco` is not installed")

from recipes.embodied.envs.franka_mjcf import PUCK_HALF_HEIGHT, mjcf  # noqa: E402 - after what they need
from recipes.embodied.envs.franka_mujoco import BEHIND, LOW_HOME, FrankaMujocoEnv  # noqa: E402


def make(num_envs: int = 2, **settings: Any) -> FrankaMujocoEnv:
    env = FrankaMujocoEnv(EnvSettings(num_envs=num_envs, **settings))
    env.reset()
    return env


def toward(env: FrankaMujocoEnv, where: NDArray[Any]) -> NDArray[np.float32]:
    """Actions that lead to points [3, B], the hand pointing down: damped least squares on the kinematics."""
    pose = np.concatenate(hand_pose(env._joints))
    jacobian = np.empty((env.num_envs, 6, 7))
    for joint in range(7):
        nudged = env._joints.copy()
        nudged[joint] += 1e-5
        jacobian[:, :, joint] = (np.concatenate(hand_pose(nudged)) - pose).T / 1e-5
    down = np.array([0.0, 0.0, -1.0])[:, None]
    error = np.concatenate((where - pose[:3], 0.3 * (down - pose[3:])))
    jacobian *= np.array([1, 1, 1, 0.3, 0.3, 0.3])[:, None]
    turned = jacobian.transpose(0, 2, 1)
    moves = turned @ np.linalg.solve(jacobian @ turned + 1e-3 * np.eye(6), error.T[:, :, None])
    actions = moves[:, :, 0] / ACTION_STEP[:, 0]
    actions /= np.maximum(np.abs(actions).max(axis=1, keepdims=True), 1)
    return actions[:, None].astype(np.float32)


def push_point(env: FrankaMujocoEnv) -> NDArray[Any]:
    """Return where a hand goes that pushes: above the far side of the puck, down behind it, then through it to the
    mark.
    """
    way, length = env._way()
    direction = way / np.maximum(length, 1e-6)
    beside = env._hand[:2] - env._puck[:2]
    across = np.abs(beside[0] * direction[1] - beside[1] * direction[0])
    lined_up = ((beside * direction).sum(axis=0) < -0.03) & (across < 0.015)
    point = env._behind()
    point[2] = np.where(lined_up, 0.02, 0.09)
    step = BEHIND - 0.05 + np.clip(length, 0, 0.05)
    point[:2] += np.where(lined_up & (env._hand[2] < 0.04), step, 0) * direction
    return point


@pytest.mark.parametrize("puck", [False, True])
def test_its_hand_is_where_our_kinematics_say(puck: bool) -> None:
    model = mujoco.MjModel.from_xml_string(mjcf(puck=puck))
    data = mujoco.MjData(model)
    many = np.random.default_rng(0).uniform(JOINT_MIN, JOINT_MAX, size=(50, 7))
    hands, axes = hand_pose(many.T)
    for q, hand, axis in zip(many, hands.T, axes.T, strict=True):
        data.qpos[:7] = q
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(data.site("tip").xpos, hand, atol=1e-9)
        np.testing.assert_allclose(data.site("tip").xmat.reshape(3, 3)[:, 2], axis, atol=1e-9)


def test_joints_go_as_fast_as_they_are_told_and_stand_still_without_sagging() -> None:
    env = make(1, max_episode_steps=1000, ignore_terminations=True)
    half = np.full((1, 1, 7), 0.5, np.float32)
    for _ in range(3):
        env.step(half)
    before = env._joints.copy()
    env.step(half)
    np.testing.assert_allclose(env._joints - before, 0.5 * ACTION_STEP, rtol=0.1)
    for _ in range(5):
        env.step(0 * half)
    before = env._joints.copy()
    for _ in range(40):
        env.step(0 * half)
    np.testing.assert_allclose(env._joints, before, atol=1e-3)


def test_joints_stay_in_their_range() -> None:
    env = make(8, max_episode_steps=1000, ignore_terminations=True)
    corners = np.where(np.random.default_rng(0).random((8, 1, 7)) < 0.5, -9, 9).astype(np.float32)
    for _ in range(100):
        env.step(corners)
        assert (env._joints > JOINT_MIN[:, None] - 0.02).all()
        assert (env._joints < JOINT_MAX[:, None] + 0.02).all()


def test_the_table_holds_the_hand() -> None:
    """A kinematic arm would be told not to go there; this one is stopped."""
    env = make(1, task="push", max_episode_steps=1000, ignore_terminations=True)
    env._state[:, 8:10] = [0.7, 0.3]  # the puck out of the way
    for _ in range(60):
        env.step(toward(env, np.vstack((env._hand[:2], np.full((1, 1), -0.3)))))
    assert -0.01 < env._hand[2, 0] < 0.03


def test_the_puck_is_moved_by_the_hand_alone() -> None:
    env = make(2, task="push", max_episode_steps=1000, ignore_terminations=True)
    env._state[:, 8:10] = [[0.5, 0.0], [0.5, 0.25]]
    start = env._puck.copy()
    for x in (*[0.42] * 20, *[0.5] * 20):
        env.step(toward(env, np.array([[x, x], [0.0, 0.0], [0.02, 0.02]])))
    assert env._puck[0, 0] - start[0, 0] > 0.02
    np.testing.assert_allclose(env._puck[:, 1], start[:, 1], atol=1e-3)
    assert env._puck[2, 1] == pytest.approx(PUCK_HALF_HEIGHT, abs=1e-3)


@pytest.mark.parametrize(("task", "steps", "share"), [("reach", 40, 1.0), ("push", 100, 0.9)])
def test_a_script_solves_it(task: str, steps: int, share: float) -> None:
    """48 starts; the reward of a solved episode is what was gained, and 1."""
    env = make(48, task=task, max_episode_steps=steps, auto_reset=False)
    rewards, solved = np.zeros(48), np.zeros(48, np.bool_)
    for _ in range(steps):
        result = env.step(toward(env, env._target if task == "reach" else push_point(env)))
        rewards += result.rewards[:, 0]
        solved |= env._episodes.success
    assert solved.mean() >= share
    assert (rewards[solved] > 1).all()


@pytest.mark.parametrize("task", ["reach", "push"])
def test_noise_does_not_solve_it(task: str) -> None:
    env, random = make(48, task=task, seed=1, auto_reset=False), np.random.default_rng(0)
    for _ in range(50):
        env.step(random.uniform(-1, 1, size=(48, 1, 7)).astype(np.float32))
    assert env._episodes.success_once.mean() < 0.3


@pytest.mark.parametrize("task", ["reach", "push"])
def test_one_seed_is_one_history(task: str) -> None:
    def history(seed: int, num_envs: int = 6, first_env: int = 0) -> list[NDArray[Any]]:
        env = make(num_envs, task=task, seed=seed, max_episode_steps=7, first_env=first_env)
        actions = np.random.default_rng(0).normal(size=(20, 6, 1, 7)).astype(np.float32)
        return [env.step(each[first_env : first_env + num_envs]).observations["states"] for each in actions]

    whole = history(1)
    assert all(np.array_equal(a, b) for a, b in zip(whole, history(1), strict=True))
    # Neighbours change nothing, so it does not matter to which worker an environment is dealt.
    assert all(np.array_equal(a[4:], b) for a, b in zip(whole, history(1, 2, 4), strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(whole, history(2), strict=True))


def test_starts_are_where_they_should_be() -> None:
    env = make(64, task="push", group_size=2)
    assert not env._successes().any()
    assert (np.abs(env._joints - LOW_HOME[:, None]) <= 0.03).all()
    assert ((env._way()[1] > 0.09) & (env._way()[1] < 0.19)).all()
    np.testing.assert_allclose(hand_pose(LOW_HOME[:, None])[0][:, 0], [0.4, 0, 0.1], atol=1e-3)
    assert np.array_equal(env._state[::2], env._state[1::2])
    assert len({tuple(row) for row in env._state}) == 32


def test_resting_environments_do_not_move() -> None:
    env = make(3, task="push", max_episode_steps=1000, auto_reset=False)
    env._episodes.resting[1] = True
    before = env._state.copy()
    result = env.step(np.ones((3, 1, 7), np.float32))
    assert np.array_equal(before[1], env._state[1])
    assert not np.array_equal(before[0], env._state[0])
    assert result.rewards[1, 0] == 0


def test_reaching_is_observed_as_the_kinematic_arm_observes_it() -> None:
    env = make(4, seed=3, group_size=2)
    other = FrankaKinEnv(EnvSettings(num_envs=4, task="reach"))
    other.reset()
    other._joints, other._hand, other._target = env._joints, env._hand, env._target
    np.testing.assert_array_equal(env._observe()["states"], other._observe()["states"])
    assert env._observe()["instructions"].tolist() == [REACH_INSTRUCTION] * 4
    assert env.spec == other.spec


@pytest.mark.parametrize("task", ["reach", "push"])
def test_observations_are_about_the_size_of_one(task: str) -> None:
    env, random, largest = make(32, task=task), np.random.default_rng(0), 0.0
    for _ in range(50):
        states = env.step(random.normal(size=(32, 1, 7)).astype(np.float32)).observations["states"]
        assert states.shape == (32, env.spec.state_size)
        assert states.dtype == np.float32
        largest = max(largest, float(np.abs(states).max()))
    assert 1 < largest < 15


@pytest.mark.parametrize(("given", "named"), [({"task": "pick"}, "pick"), ({"options": {"colour": 1}}, "colour")])
def test_what_it_does_not_have_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)`{named}`.*`reach` and `push`"):
        make(**given)


def test_the_model_is_of_primitive_shapes_alone() -> None:
    text = mjcf(puck=True)
    assert set(re.findall(r' type="(\w+)"', text)) == {"plane", "capsule", "box", "cylinder"}
    assert "mesh" not in text
    assert "file" not in text


def test_it_is_fast_enough() -> None:
    """Tens of thousands of steps in a CPU second; a tenth of what was measured is asked."""
    env = make(64)
    actions = np.random.default_rng(0).uniform(-1, 1, size=(64, 1, 7)).astype(np.float32)
    begun = time.process_time()
    for _ in range(20):
        env.step(actions)
    assert 20 * 64 / (time.process_time() - begun) > 3_000
    assert distance(env._hand, hand_pose(env._joints)[0]).max() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pushing_is_learned(seed: int) -> None:
    from benchmarks.single_process_ppo import arguments, run

    words = ["--env-type", "franka_mujoco", "--task", "push", "--steps", "250", "--every", "10", "--stop"]
    assert run(arguments(words), seed).reached is not None
