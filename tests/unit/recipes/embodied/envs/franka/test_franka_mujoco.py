"""The arm in MuJoCo: the same arm as the kinematic one, with contacts; solvable, and one history for one seed."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.franka.franka_kin import FrankaKinEnv
from recipes.embodied.envs.franka.franka_tasks import move_toward
from recipes.embodied.robots.franka_arm import ACTION_STEP, JOINT_MAX, JOINT_MIN, REACH_INSTRUCTION, distance, hand_pose
from rlinf_core.errors import ConfigError

mujoco = pytest.importorskip("mujoco", reason="the extra `mujoco` is not installed")

from recipes.embodied.envs.franka.franka_mjcf import BLOCK_HALF, PUCK_HALF_HEIGHT, Body, mjcf  # noqa: E402 - after mujoco
from recipes.embodied.envs.franka.franka_mujoco import FrankaMujocoEnv  # noqa: E402
from recipes.embodied.envs.franka.franka_tasks import LOW_HOME, PushTask  # noqa: E402


def make(num_envs: int = 2, **settings: Any) -> FrankaMujocoEnv:
    env = FrankaMujocoEnv(EnvSettings(num_envs=num_envs, **settings))
    env.reset()
    return env


def carry_out(env: FrankaMujocoEnv, points: NDArray[Any]) -> None:
    """Lead the hands toward points [3, B] by one action."""
    moves = move_toward(env._scene.joints, points)
    rest = np.zeros((env.spec.action_size - 7, env.num_envs))
    env.step(np.vstack((moves, rest)).T[:, None].astype(np.float32))


def penetration(env: FrankaMujocoEnv) -> float:
    """Return how far fingers or table reach into a block, in metres, at most of all environments."""
    model, deepest = env._model, 0.0
    data, block = mujoco.MjData(model), model.geom("block").id
    for row in env._state:
        mujoco.mj_setState(model, data, row, mujoco.mjtState.mjSTATE_FULLPHYSICS)
        mujoco.mj_forward(model, data)
        inside = [-contact.dist for contact in data.contact[: data.ncon] if block in contact.geom]
        deepest = max([deepest, *inside])
    return deepest


@pytest.mark.parametrize("body", [None, "puck", "block"])
def test_its_hand_is_where_our_kinematics_say(body: Body | None) -> None:
    model = mujoco.MjModel.from_xml_string(mjcf(body))
    data = mujoco.MjData(model)
    many = np.random.default_rng(0).uniform(JOINT_MIN, JOINT_MAX, size=(50, 7))
    hands, axes = hand_pose(many.T)
    for q, hand, axis in zip(many, hands.T, axes.T, strict=True):
        data.qpos[:7] = q
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(data.site("tip").xpos, hand, atol=1e-9)
        np.testing.assert_allclose(data.site("tip").xmat.reshape(3, 3)[:, 2], axis, atol=1e-9)


def test_joints_move_at_command_speed_and_hold_without_sagging() -> None:
    env = make(1, max_episode_steps=1000, ignore_terminations=True)
    half = np.full((1, 1, 7), 0.5, np.float32)
    for _ in range(3):
        env.step(half)
    before = env._scene.joints.copy()
    env.step(half)
    np.testing.assert_allclose(env._scene.joints - before, 0.5 * ACTION_STEP, rtol=0.1)
    for _ in range(5):
        env.step(0 * half)
    before = env._scene.joints.copy()
    for _ in range(40):
        env.step(0 * half)
    np.testing.assert_allclose(env._scene.joints, before, atol=1e-3)


def test_joints_stay_in_their_range() -> None:
    env = make(8, max_episode_steps=1000, ignore_terminations=True)
    corners = np.where(np.random.default_rng(0).random((8, 1, 7)) < 0.5, -9, 9).astype(np.float32)
    for _ in range(100):
        env.step(corners)
        assert (env._scene.joints > JOINT_MIN[:, None] - 0.02).all()
        assert (env._scene.joints < JOINT_MAX[:, None] + 0.02).all()


def test_the_table_holds_the_hand() -> None:
    """A kinematic arm would be told not to go there; this one is stopped."""
    env = make(1, task="push", max_episode_steps=1000, ignore_terminations=True)
    env._state[:, 8:10] = [0.7, 0.3]  # the puck out of the way
    for _ in range(60):
        carry_out(env, np.vstack((env._scene.hand[:2], np.full((1, 1), -0.3))))
    assert -0.01 < env._scene.hand[2, 0] < 0.03


def test_the_puck_is_moved_by_the_hand_alone() -> None:
    env = make(2, task="push", max_episode_steps=1000, ignore_terminations=True)
    env._state[:, 8:10] = [[0.5, 0.0], [0.5, 0.25]]
    start = env._scene.body.copy()
    for x in (*[0.42] * 20, *[0.5] * 20):
        carry_out(env, np.array([[x, x], [0.0, 0.0], [0.02, 0.02]]))
    assert env._scene.body[0, 0] - start[0, 0] > 0.02
    np.testing.assert_allclose(env._scene.body[:, 1], start[:, 1], atol=1e-3)
    assert env._scene.body[2, 1] == pytest.approx(PUCK_HALF_HEIGHT, abs=1e-3)


@pytest.mark.parametrize(
    ("task", "steps", "share"), [("reach", 40, 1.0), ("push", 100, 0.9), ("pick", 50, 1.0), ("place", 50, 1.0)]
)
def test_the_expert_solves_it(task: str, steps: int, share: float) -> None:
    """48 starts; the reward of a solved episode is what was gained, and 1."""
    env = make(48, task=task, max_episode_steps=steps, auto_reset=False)
    rewards, solved = np.zeros(48), np.zeros(48, np.bool_)
    for _ in range(steps):
        actions = env.expert()
        assert actions.dtype == np.float32
        assert np.abs(actions).max() <= 1
        result = env.step(actions[:, None])
        rewards += result.rewards[:, 0]
        solved |= env._episodes.success
    assert solved.mean() >= share
    assert (rewards[solved] > 1).all()


@pytest.mark.parametrize("task", ["pick", "place"])
def test_a_grasp_is_two_fingers_that_press_against_the_block(task: str) -> None:
    """Nothing else holds it: it lies on the table until then, and falls when the fingers open."""
    env = make(16, task=task, auto_reset=False, ignore_terminations=True, max_episode_steps=1000)
    deepest, lifted = 0.0, np.zeros(16, np.bool_)
    for _ in range(70):
        env.step(env.expert()[:, None])
        deepest = max(deepest, penetration(env))
        lifted |= env._scene.body[2] > 0.05
        assert (env._scene.body[2][~lifted] < 0.05).all()
    assert env._episodes.success_once.all()
    assert (env._scene.body[2] > 0.07).all()
    assert deepest < 0.003
    # As wide as the block, within what its surface gives way.
    assert (np.abs(env._scene.opening - 2 * BLOCK_HALF) < 0.003).all()
    opens = np.zeros((16, 1, 8), np.float32)
    opens[:, :, 7] = -1
    for _ in range(20):
        env.step(opens)
    assert (env._scene.body[2] < 0.03).all()
    assert not env._scene.held.any()


def test_closed_fingers_beside_a_block_hold_nothing() -> None:
    env = make(4, task="pick", max_episode_steps=1000)
    closes = np.zeros((4, 1, 8), np.float32)
    closes[:, :, 7] = 1
    for _ in range(20):
        env.step(closes)
    assert (env._scene.opening < 0.005).all()
    assert not env._scene.held.any()
    assert env._scene.closed.all()


@pytest.mark.parametrize("task", ["reach", "push", "pick", "place"])
def test_noise_does_not_solve_it(task: str) -> None:
    env, random = make(48, task=task, seed=1, auto_reset=False), np.random.default_rng(0)
    for _ in range(50):
        env.step(random.uniform(-1, 1, size=(48, 1, env.spec.action_size)).astype(np.float32))
    assert env._episodes.success_once.mean() < 0.3


def test_starts_are_where_they_should_be() -> None:
    env = make(64, task="push", group_size=2)
    task = env._task
    assert isinstance(task, PushTask)
    assert not task.successes(env._scene).any()
    assert (np.abs(env._scene.joints - LOW_HOME[:, None]) <= 0.03).all()
    assert ((task.way(env._scene)[1] > 0.09) & (task.way(env._scene)[1] < 0.19)).all()
    np.testing.assert_allclose(hand_pose(LOW_HOME[:, None])[0][:, 0], [0.4, 0, 0.1], atol=1e-3)
    assert np.array_equal(env._state[::2], env._state[1::2])
    assert len({tuple(row) for row in env._state}) == 32


def test_reaching_is_observed_as_the_kinematic_arm_observes_it() -> None:
    env = make(4, seed=3, group_size=2)
    other = FrankaKinEnv(EnvSettings(num_envs=4, task="reach"))
    other.reset()
    other._joints, other._hand, other._target = env._scene.joints, env._scene.hand, env._task.target
    np.testing.assert_array_equal(env._observe()["states"], other._observe()["states"])
    assert env._observe()["instructions"].tolist() == [REACH_INSTRUCTION] * 4
    assert env.spec == other.spec


@pytest.mark.parametrize("task", ["reach", "push", "pick", "place"])
def test_observations_are_about_the_size_of_one(task: str) -> None:
    env, random, largest = make(32, task=task), np.random.default_rng(0), 0.0
    for _ in range(50):
        states = env.step(random.normal(size=(32, 1, env.spec.action_size)).astype(np.float32)).observations["states"]
        assert states.shape == (32, env.spec.state_size)
        assert states.dtype == np.float32
        largest = max(largest, float(np.abs(states).max()))
    assert 1 < largest < 15


@pytest.mark.parametrize(("value", "named"), [({"task": "stack"}, "stack"), ({"options": {"colour": 1}}, "colour")])
def test_what_it_does_not_have_is_refused(value: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)`{named}`.*`reach` and `push` and `pick` and `place`"):
        make(**value)


def test_the_model_is_of_primitive_shapes_alone() -> None:
    text = mjcf("puck") + mjcf("block")
    assert set(re.findall(r'<geom[^>]* type="(\w+)"', text)) == {"plane", "capsule", "box", "cylinder"}
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
    assert distance(env._scene.hand, hand_pose(env._scene.joints)[0]).max() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pushing_is_learned(seed: int) -> None:
    from benchmarks.baselines.single_process_ppo import arguments, run

    words = ["--env-type", "franka_mujoco", "--task", "push", "--steps", "250", "--every", "10", "--stop"]
    assert run(arguments(words), seed).reached is not None
