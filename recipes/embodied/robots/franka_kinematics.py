"""Forward kinematics of the Franka Emika Panda (Franka Research 3 has the same), in numpy, for many arms at once.

Modified Denavit-Hartenberg parameters (Craig's convention) and joint limits as published by Franka:
https://frankaemika.github.io/docs/control_parameters.html. The transform of joint i from its parent is Rot_x(alpha)
Trans_x(a) Rot_z(theta) Trans_z(d).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Link(NamedTuple):
    """One row of the table: `a` and `d` in meters, `alpha` in quarter turns."""

    a: float
    d: float
    alpha: int


LINKS = (
    Link(0.0, 0.333, 0),
    Link(0.0, 0.0, -1),
    Link(0.0, 0.316, 1),
    Link(0.0825, 0.0, 1),
    Link(-0.0825, 0.384, -1),
    Link(0.0, 0.0, 1),
    Link(0.088, 0.0, 1),
)
# From the last joint to the flange, and from there to the point between the fingertips of the Franka Hand, in meters.
FLANGE = 0.107
FINGERTIPS = 0.1034
# Radians, and radians per second.
JOINT_MIN = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])
JOINT_MAX = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
VELOCITY_MAX = np.array([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61])
# The usual ready pose: the hand in front of the arm, pointing down.
HOME = np.array([0.0, -np.pi / 4, 0.0, -3 * np.pi / 4, 0.0, np.pi / 2, np.pi / 4])


def points_on_hand(joints: NDArray[np.floating], heights: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the positions of points on the axis of the last joint.

    Args:
        joints: [7, B], in radians.
        heights: K heights above the frame of the last joint, in meters; `FLANGE + FINGERTIPS` is the tool center point.

    Returns:
        [3, K, B]: x (forward), y (left), z (up), in metres from the base.
    """
    sines, cosines = np.sin(joints), np.cos(joints)
    shape = (len(heights), joints.shape[1])
    x, y = np.zeros(shape), np.zeros(shape)
    z = np.broadcast_to(np.array(heights)[:, None], shape)
    # From the hand back to the base: each joint rotates and shifts everything after it.
    for index in range(len(LINKS) - 1, -1, -1):
        a, d, alpha = LINKS[index]
        sine, cosine = sines[index], cosines[index]
        x, y = cosine * x - sine * y, sine * x + cosine * y
        if d:
            z = z + d
        if a:
            x = x + a
        if alpha:
            y, z = (-z, y) if alpha > 0 else (z, -y)
    return np.stack((x, y, z))


def hand_pose(joints: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the position of the point between the fingertips, and the hand's direction; both [3, B].

    Args:
        joints: [7, B], in radians.
    """
    points = points_on_hand(joints, (FLANGE + FINGERTIPS, FLANGE))
    return points[:, 0], (points[:, 0] - points[:, 1]) / FINGERTIPS


def arm_points(joints: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the ends of the arm's straight segments, from the base to the fingertips, [K, 3, B] in meters.

    Args:
        joints: [7, B], in radians.
    """
    pose = np.tile(np.eye(4), (joints.shape[1], 1, 1))
    points = [np.zeros((3, joints.shape[1]))]
    for link, theta in zip(LINKS, joints, strict=True):
        pose = pose @ _link_transform(link, theta)
        points.append(pose[:, :3, 3].T)
    axis = pose[:, :3, 2].T
    points += [points[-1] + FLANGE * axis, points[-1] + (FLANGE + FINGERTIPS) * axis]
    return np.stack(points)


def _link_transform(link: Link, theta: NDArray[np.floating]) -> NDArray[np.float64]:
    sine, cosine = np.sin(theta), np.cos(theta)
    turn_cosine, turn_sine = (1.0, 0.0) if link.alpha == 0 else (0.0, float(link.alpha))
    matrix = np.zeros((len(theta), 4, 4))
    matrix[:, 0] = np.stack((cosine, -sine, np.zeros_like(sine), np.full_like(sine, link.a)), axis=1)
    for row, (along, across) in ((1, (turn_cosine, -turn_sine)), (2, (turn_sine, turn_cosine))):
        matrix[:, row, 0] = sine * along
        matrix[:, row, 1] = cosine * along
        matrix[:, row, 2] = across
        matrix[:, row, 3] = across * link.d
    matrix[:, 3, 3] = 1
    return matrix
