"""Motions of scripted experts: a hand led to a point by damped least squares on the kinematics, and a gripper.

Experts have no memory: an action is a function of the present state, so that it can be asked for at any time, in the
states that a policy gets into, too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.franka_arm import ACTION_STEP
from recipes.embodied.robots.franka_kinematics import hand_pose
from recipes.training.arrays import Array

# Added to the squares, so that motions stay small where the arm is stretched.
DAMPING: Final = 1e-3
# How much the hand's direction counts, in metres by a unit of it.
DIRECTION_WEIGHT: Final = 0.3
_NUDGE: Final = 1e-5
_DOWN: Final = np.array([0.0, 0.0, -1.0])[:, None]


def move_toward(joints: Array, points: Array) -> NDArray[np.float64]:
    """Return actions [7, B] that lead the hands to points, pointing down.

    Args:
        joints: [7, B], in radians.
        points: [3, B], in metres.
    """
    actions = (step_toward(joints, points) - joints) / ACTION_STEP
    return actions / np.maximum(np.abs(actions).max(axis=0), 1)


def step_toward(joints: Array, points: Array) -> NDArray[np.float64]:
    """Return joints [7, B] whose hands are nearer to points [3, B], or there, and point down: one step of damped least
    squares.
    """
    pose = np.concatenate(hand_pose(joints))
    jacobian = np.empty((joints.shape[1], 6, 7))
    for joint in range(7):
        nudged = joints.copy()
        nudged[joint] += _NUDGE
        jacobian[:, :, joint] = (np.concatenate(hand_pose(nudged)) - pose).T / _NUDGE
    error = np.concatenate((points - pose[:3], DIRECTION_WEIGHT * (_DOWN - pose[3:])))
    jacobian[:, 3:] *= DIRECTION_WEIGHT
    turned = jacobian.transpose(0, 2, 1)
    moves = turned @ np.linalg.solve(jacobian @ turned + DAMPING * np.eye(6), error.T[:, :, None])
    return joints + moves[:, :, 0].T


def gripper_move(closes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return [B], the number of an action that closes the gripper, or opens it."""
    return np.where(closes, 1.0, -1.0)
