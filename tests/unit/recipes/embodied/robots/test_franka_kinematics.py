"""Where the hand is: two ways of ours, MuJoCo's, and poses that anybody can check."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.robots.franka_kinematics import (
    FINGERTIPS,
    FLANGE,
    HOME,
    JOINT_MAX,
    JOINT_MIN,
    arm_points,
    points_on_hand,
)

# Joints, and the flange's position and z axis that MuJoCo 4.0.0 (mj_kinematics) gives for the model below.
MUJOCO = [
    (
        [0.3, -0.5, 0.2, -2.0, 0.1, 1.7, 0.5],
        [0.344025982, 0.22398259, 0.666555502],
        [0.166431193, 0.092020374, -0.981749922],
    ),
    (
        [-1.9, 1.2, -0.7, -0.4, 2.2, 0.3, -2.5],
        [-0.182179822, -0.627689447, 0.469935203],
        [0.771760717, 0.633228208, -0.058373225],
    ),
    (
        [2.5, -1.6, 2.8, -2.9, -2.1, 3.4, 1.0],
        [-0.098254108, 0.096067271, 0.09826882],
        [-0.677385217, 0.721110924, -0.14542456],
    ),
]
# Position and quaternion of each link in its parent, as robot descriptions give them: not made from our table.
BODIES = (
    ("0 0 0.333", "1 0 0 0"),
    ("0 0 0", "1 -1 0 0"),
    ("0 -0.316 0", "1 1 0 0"),
    ("0.0825 0 0", "1 1 0 0"),
    ("-0.0825 0.384 0", "1 -1 0 0"),
    ("0 0 0", "1 1 0 0"),
    ("0.088 0 0", "1 1 0 0"),
)


def mjcf() -> str:
    """Return the arm as a MuJoCo model."""
    opening = "".join(
        f'<body pos="{position}" quat="{turn}"><joint axis="0 0 1"/><geom size="0.01" mass="1"/>'
        for position, turn in BODIES
    )
    site = '<site name="flange" pos="0 0 0.107"/>'
    return f"<mujoco><worldbody>{opening}{site}{'</body>' * len(BODIES)}</worldbody></mujoco>"


joints = st.lists(st.floats(0, 1), min_size=7, max_size=7).map(
    lambda share: np.array([JOINT_MIN + np.array(share) * (JOINT_MAX - JOINT_MIN)]).T
)


def flange_and_axis(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the flange is and the direction in which the hand points, of the product of the table; [B, 3] of both."""
    flange, tip = arm_points(q)[-2:]
    return flange.T, (tip - flange).T / FINGERTIPS


@given(joints)
def test_points_are_those_of_the_product_of_the_table(q: np.ndarray) -> None:
    points = points_on_hand(q, (FLANGE, FLANGE + FINGERTIPS))
    np.testing.assert_allclose(points.swapaxes(0, 1), arm_points(q)[-2:], atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(flange_and_axis(q)[1]), 1, atol=1e-9)


@pytest.mark.parametrize(("q", "position", "axis"), MUJOCO)
def test_poses_are_those_that_mujoco_gave(q: list[float], position: list[float], axis: list[float]) -> None:
    flange, points_to = flange_and_axis(np.array([q]).T)
    np.testing.assert_allclose(flange[0], position, atol=1e-6)
    np.testing.assert_allclose(points_to[0], axis, atol=1e-6)


def test_poses_are_those_that_mujoco_gives() -> None:
    mujoco = pytest.importorskip("mujoco")
    model = mujoco.MjModel.from_xml_string(mjcf())
    data = mujoco.MjData(model)
    random = np.random.default_rng(0)
    many = random.uniform(JOINT_MIN, JOINT_MAX, size=(50, 7))
    for q, flange, axis in zip(many, *flange_and_axis(many.T), strict=True):
        data.qpos[:] = q
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(flange, data.site("flange").xpos, atol=1e-9)
        np.testing.assert_allclose(axis, data.site("flange").xmat.reshape(3, 3)[:, 2], atol=1e-9)


def test_straight_up_the_lengths_add() -> None:
    """All joints at 0: 0.333 + 0.316 + 0.384 - 0.107 high, the hand pointing down 0.088 m in front."""
    flange, axis = flange_and_axis(np.zeros((7, 1)))
    np.testing.assert_allclose(flange[0], [0.088, 0, 0.926], atol=1e-12)
    np.testing.assert_allclose(axis[0], [0, 0, -1], atol=1e-12)


def test_at_home_the_hand_points_down_in_front() -> None:
    assert ((JOINT_MIN < HOME) & (JOINT_MAX > HOME)).all()
    flange, axis = flange_and_axis(HOME[:, None])
    np.testing.assert_allclose(axis[0], [0, 0, -1], atol=1e-12)
    assert 0.25 < flange[0, 0] < 0.35
    assert flange[0, 1] == pytest.approx(0, abs=1e-12)


@given(joints, st.floats(-1, 1))
def test_the_first_joint_turns_everything_about_the_vertical(q: np.ndarray, turn: float) -> None:
    turned = q.copy()
    turned[0] += turn
    before, after = (points_on_hand(item, (FLANGE,))[:, 0, 0] for item in (q, turned))
    cosine, sine = math.cos(turn), math.sin(turn)
    expected = [cosine * before[0] - sine * before[1], sine * before[0] + cosine * before[1], before[2]]
    np.testing.assert_allclose(after, expected, atol=1e-9)
