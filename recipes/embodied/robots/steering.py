"""Hand motions commanded by a person, as actions of the Franka arm: damped least squares on its kinematics."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.interventions.intervention import HandMotion
from recipes.embodied.robots.franka_arm import ACTION_STEP, CONTROL_SECONDS
from recipes.embodied.robots.franka_kinematics import hand_pose
from recipes.training.arrays import Array

HAND_SPEED: Final = 0.25  # metres a second, of a motion of 1
TURN_SPEED: Final = 1.0  # radians a second, likewise
_DAMPING: Final = 1e-3
_DIRECTION_WEIGHT: Final = 0.3  # how much the hand's direction counts, in metres by a unit of it
_NUDGE: Final = 1e-5


def steered(joints: Array, motion: HandMotion, grips: bool) -> NDArray[np.float32]:
    """Return the action, float32 [7], or [8] with a gripper, that moves the hand as commanded in one step.

    The hand may move slower than asked, never in another direction: all joints are slowed down together.

    Args:
        joints: [7], in radians.
        motion: the motion, as seen from the base of the arm.
        grips: whether the last number of an action is for the gripper.
    """
    turn = np.array(motion.angular) * TURN_SPEED * CONTROL_SECONDS
    axis = hand_pose(joints[:, None])[1][:, 0]
    way = np.array(motion.linear) * HAND_SPEED * CONTROL_SECONDS
    wanted = np.concatenate((way, _DIRECTION_WEIGHT * np.cross(turn, axis)))
    jacobian = _jacobian(joints)
    move = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + _DAMPING * np.eye(6), wanted)
    move[6] += turn @ axis  # the last joint turns the hand about its own direction, and nothing else does
    action = move / ACTION_STEP[:, 0]
    action /= max(1.0, float(np.abs(action).max()))
    grip = [1.0 if motion.gripper_closed else -1.0] if grips else []
    return np.concatenate((action, grip)).astype(np.float32)


def _jacobian(joints: Array) -> NDArray[np.float64]:
    """Return [6, 7], of the hand's position and its weighted direction."""
    nudged = np.column_stack((joints, joints[:, None] + _NUDGE * np.eye(7)))
    poses = np.concatenate(hand_pose(nudged))
    jacobian = (poses[:, 1:] - poses[:, :1]) / _NUDGE
    jacobian[3:] *= _DIRECTION_WEIGHT
    return jacobian
