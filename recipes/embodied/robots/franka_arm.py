"""The common part of all environments with a Franka arm: kinematics, control, the task `reach`, the observations.

The actions and observations of `reach` are the same for the kinematic arm, in MuJoCo and on a robot, so that a policy
can move between them. The kinematics are those of the Franka Emika Panda (Franka Research 3 has the same), in numpy,
for many arms at once: modified Denavit-Hartenberg parameters (Craig's convention) and joint limits as published by
Franka, https://frankaemika.github.io/docs/control_parameters.html. The transform of joint i from its parent is
Rot_x(alpha) Trans_x(a) Rot_z(theta) Trans_z(d).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.training.arrays import Array
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.interventions.intervention import HandMotion


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


# The lower and the upper corner of a box, in meters.
Workspace: TypeAlias = Sequence[Sequence[float]]

CONTROL_SECONDS = 0.05  # between two actions
SPEED = 0.5  # share of the published joint velocities for an action of 1
# Radians per second, and radians per action, of each joint; both [7, 1].
ACTION_VELOCITY = (SPEED * VELOCITY_MAX)[:, None]
ACTION_STEP = (SPEED * VELOCITY_MAX * CONTROL_SECONDS)[:, None]
# The region of points to reach: x forward, y left, z up, in meters.
POINT_LOW, POINT_HIGH = np.array([0.3, -0.3, 0.1]), np.array([0.6, 0.3, 0.5])
HOME_NOISE = 0.1  # the most radians between the arm's start and its home
# Shares of this noise that are tried if the hand would be outside the workspace.
_SHARES_OF_NOISE = (1, 0.5, 0.25, 0)
REACH_RADIUS = 0.05
REACH_STATES, REACH_ACTIONS = 16, 7
OWN_STATES = 10  # states of the arm alone: joints and hand, which come first
GRIPPER_THRESHOLD = 0.5  # value of an action above which the gripper closes; below its negative it opens
REACH_INSTRUCTION = "move the hand to the marked point"
# Scales that bring observations to about 1.
_MIDDLE, _SPREAD = np.array([0.45, 0.0, 0.25])[:, None], 0.25
NEAR = 0.1
# For motions commanded by a person: meters and radians per second at full deflection.
HAND_SPEED: Final = 0.25
TURN_SPEED: Final = 1.0
_DAMPING: Final = 1e-3
_DIRECTION_WEIGHT: Final = 0.3  # the weight of the hand's direction, in meters per unit
_NUDGE: Final = 1e-5
_RANGE_MIDDLE, _RANGE = ((JOINT_MAX + JOINT_MIN) / 2)[:, None], ((JOINT_MAX - JOINT_MIN) / 2)[:, None]


def scaled_position(points: Array) -> NDArray[np.float64]:
    """Return positions [3, B], given in meters, scaled to about 1."""
    return (points - _MIDDLE) / _SPREAD


def scaled_joints(joints: Array) -> NDArray[np.float64]:
    """Return joints [7, B], given in radians, as fractions of their range from -1 to 1."""
    return (joints - _RANGE_MIDDLE) / _RANGE


def write_arm_states(columns: Array, joints: Array, hand: Array, target: Array) -> None:
    """Fill the first 16 rows of `columns` [S, B]: joints, hand, target, and the vector from hand to target.

    Args:
        columns: the array to fill.
        joints: [7, B], in radians.
        hand: [3, B], in metres, the point between the fingertips.
        target: [3, B], in metres.
    """
    columns[:7] = scaled_joints(joints)
    columns[7:10] = scaled_position(hand)
    columns[10:13] = scaled_position(target)
    columns[13:16] = (target - hand) / NEAR


def distance(points: Array, others: Array) -> NDArray[np.float64]:
    """Return the distances [B] between points [D, B]."""
    away = points - others
    return np.sqrt(np.einsum("db,db->b", away, away))


def start_joints(draws: Array) -> NDArray[np.float64]:
    """Return joints [7, B] around the arm's home, from random numbers [7, B]."""
    return HOME[:, None] + HOME_NOISE * (2 * draws - 1)


def start_within(draws: Array, workspace: Workspace | None) -> NDArray[np.float64]:
    """Return joints [7, 1] around the arm's home, from random numbers [7, 1]; closer to home if the hand would be
    outside.

    Args:
        draws: the random numbers, from 0 to 1.
        workspace: the lower and the upper corner [3] of the hand's box; None: no limit.
    """
    joints = HOME[:, None]
    for share in _SHARES_OF_NOISE:
        joints = HOME[:, None] + share * HOME_NOISE * (2 * draws - 1)
        if is_within(hand_pose(joints)[0][:, 0], workspace):
            break
    return joints


def is_within(point: Array, workspace: Workspace | None) -> bool:
    """Return whether a point [3] is in a workspace; None: no limit."""
    return workspace is None or bool((point >= workspace[0]).all() and (point <= workspace[1]).all())


def points_within(workspace: Workspace | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the corners [3] of the box that points to reach are drawn from, within a workspace.

    Raises:
        ConfigError: there is no such box.
    """
    if workspace is None:
        return POINT_LOW, POINT_HIGH
    low, high = np.maximum(POINT_LOW, workspace[0]), np.minimum(POINT_HIGH, workspace[1])
    if (low > high).any():
        raise ConfigError(
            "no point of the task `reach` is in the arm's `workspace`",
            why=f"they are from {POINT_LOW.tolist()} to {POINT_HIGH.tolist()} m",
            help="correct `workspace`",
        )
    return low, high


def between(low: Array, high: Array, draws: Array) -> NDArray[np.float64]:
    """Return points [D, B] in the box from `low` to `high` [D], from random numbers [D, B]."""
    return low[:, None] + (high - low)[:, None] * draws


def reach_target(draws: Array, workspace: Workspace | None = None) -> NDArray[np.float64]:
    """Return the points [3, B] to reach, from random numbers [3, B]; see `points_within`."""
    return between(*points_within(workspace), draws)


def reach_potential(target: Array, hand: Array) -> NDArray[np.float64]:
    """Return the potential of `reach`, [B]; rewards are its differences."""
    return -2 * distance(target, hand)


def reached(target: Array, hand: Array) -> NDArray[np.bool_]:
    """Return bool [B], success of `reach`."""
    return distance(target, hand) < REACH_RADIUS


def check_task(env_type: str, task: str, tasks: Sequence[str], options: Mapping[str, Any], known: str = "") -> None:
    """Refuse a task or options that an environment lacks.

    Args:
        env_type: the environment type, for the message.
        task: the requested task.
        tasks: the known tasks.
        options: the requested options.
        known: the known options, none by default.

    Raises:
        ConfigError: the task or an option is unknown.
    """
    strange = [name for name in options if name not in known.split()]
    if task in tasks and not strange:
        return
    problem = f"unknown option `{strange[0]}`" if task in tasks else f"unknown task `{task}`"
    listed = " and ".join(f"`{name}`" for name in tasks)
    has = "its task is" if len(tasks) == 1 else "its tasks are"
    rest = f"its options are {', '.join(f'`{name}`' for name in known.split())}" if known else "it has no options"
    raise ConfigError(f"{problem} of `env_type: {env_type}`", help=f"{has} {listed}, and {rest}")


def steered(joints: Array, motion: HandMotion, grips: bool) -> NDArray[np.float32]:
    """Return the action, float32 [7], or [8] with a gripper, that moves the hand as commanded in one step, by damped
    least squares.

    The hand may move slower than commanded, but never in another direction: all joints are slowed down together.

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
    move[6] += turn @ axis  # the last joint only rotates the hand about its own direction
    action = move / ACTION_STEP[:, 0]
    action /= max(1.0, float(np.abs(action).max()))
    grip = [1.0 if motion.gripper_closed else -1.0] if grips else []
    return np.concatenate((action, grip)).astype(np.float32)


def _jacobian(joints: Array) -> NDArray[np.float64]:
    """Return the Jacobian [6, 7] of the hand's position and its weighted direction."""
    nudged = np.column_stack((joints, joints[:, None] + _NUDGE * np.eye(7)))
    poses = np.concatenate(hand_pose(nudged))
    jacobian = (poses[:, 1:] - poses[:, :1]) / _NUDGE
    jacobian[3:] *= _DIRECTION_WEIGHT
    return jacobian
