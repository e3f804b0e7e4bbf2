"""Tasks of the Franka arm in MuJoCo: starts of episodes, progress and success, and a scripted expert.

A task sees the scene of all environments as arrays [.., B] and keeps the targets of their episodes. The environment,
`franka_mujoco`, does the physics. Experts lead the hand to a point by damped least squares on the kinematics, and have
no memory, so that they also work in states that a policy has reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import BoolArray, IntArray
from recipes.embodied.envs.franka.franka_mjcf import BLOCK_HALF, FINGER_TRAVEL, PUCK_HALF_HEIGHT, PUCK_RADIUS, Body
from recipes.embodied.robots.franka_arm import (
    ACTION_STEP,
    REACH_ACTIONS,
    REACH_INSTRUCTION,
    REACH_STATES,
    between,
    distance,
    hand_pose,
    reach_potential,
    reach_target,
    reached,
    scaled_position,
    start_joints,
)
from recipes.training.arrays import Array

Floats: TypeAlias = NDArray[np.float64]

# The hand pointing down at x = 0.40 m, z = 0.10 m, where pushing and picking begin.
LOW_HOME = np.array([0.0, 0.0654, 0.0, -2.7266, 0.0, 2.7921, np.pi / 4])
LOW_NOISE = 0.03
# The region of pucks, and the distance and direction (radians from straight ahead) of the mark from there; in meters.
PUCK_LOW, PUCK_HIGH = np.array([0.45, -0.12]), np.array([0.52, 0.12])
MARK_NEAR, MARK_FAR, MARK_ANGLE = 0.1, 0.18, np.pi / 3
PUSH_RADIUS = 0.04
BEHIND = PUCK_RADIUS + 0.02  # from the puck's center to the best place of the hand for pushing
# The region of blocks, the region of goals, the height to lift and the tolerance; in meters.
BLOCK_LOW, BLOCK_HIGH = np.array([0.42, -0.12]), np.array([0.52, 0.12])
GOAL_LOW, GOAL_HIGH = np.array([0.4, -0.15, 0.12]), np.array([0.55, 0.15, 0.3])
LIFT_HEIGHT = 0.08
PLACE_RADIUS = 0.04
# The range of finger openings that hold a block, and the distance of a held block from the tool center point; in
# meters.
HELD_OPENING = (1.6 * BLOCK_HALF, 2.9 * BLOCK_HALF)
HELD_RADIUS = 0.04
# For the expert: the height of a block before it is carried, and the distance of a step; in meters.
CARRY_HEIGHT, CARRY_STEP = 0.04, 0.015
FAR = 0.4  # distance from the point, in meters, beyond which the potential is flat
GRASP_WIDTH = 0.03  # distance from the block, in meters, at which a grasp counts

# Added to the squares, so that motions stay small near singularities.
DAMPING: Final = 1e-3
# The weight of the hand's direction, in meters per unit.
DIRECTION_WEIGHT: Final = 0.3
_NUDGE: Final = 1e-5
_DOWN: Final = np.array([0.0, 0.0, -1.0])[:, None]


@dataclass(slots=True)
class Scene:
    """The state of all environments that tasks depend on.

    Attributes:
        joints: [7, B], in radians.
        hand: [3, B], the tool centre point, in metres.
        axis: [3, B], the direction in which the hand points.
        body: [3, B], center of the puck or block, in meters.
        velocity: [3, B], of the puck or block, in metres a second.
        opening: [B], between the fingers, in metres.
        touched: bool [B], both fingers press against something.
        closed: bool [B], whether the fingers were commanded to close.
    """

    joints: Floats
    hand: Floats
    axis: Floats
    body: Floats
    velocity: Floats
    opening: Floats
    touched: BoolArray
    closed: BoolArray

    @property
    def held(self) -> BoolArray:
        """bool [B]: the block is between both fingers, and both press against it."""
        low, high = HELD_OPENING
        near = distance(self.body, self.hand) < HELD_RADIUS
        return self.touched & near & (self.opening > low) & (self.opening < high)


class Task(ABC):
    """A task of `count` environments, B.

    Attributes:
        target: [3, B], the goal of the hand or the body, in meters.
    """

    instruction: ClassVar[str]
    body: ClassVar[Body | None] = None
    state_size: ClassVar[int] = REACH_STATES
    action_size: ClassVar[int] = REACH_ACTIONS
    draws: ClassVar[int] = 10

    def __init__(self, count: int) -> None:
        self.target = np.zeros((3, count))

    def joints(self, draws: Floats) -> Floats:
        """Return the joints [7, n] of starts, from random numbers [7, n]."""
        return LOW_HOME[:, None] + LOW_NOISE * (2 * draws - 1)

    @abstractmethod
    def place(self, rows: IntArray, draws: Floats) -> Floats:
        """Set the targets of new episodes; return the places of the bodies, [3, n].

        Args:
            rows: the environments, n of them.
            draws: random numbers [draws - 7, n].
        """

    def turn(self, places: Floats) -> Floats:
        """Return the quaternions [4, n] of bodies at starts, whose places are [3, n]."""
        quaternions = np.zeros((4, places.shape[1]))
        quaternions[0] = 1
        return quaternions

    @abstractmethod
    def potential(self, scene: Scene) -> Floats:
        """Return the potential [B] whose differences are the rewards."""

    @abstractmethod
    def successes(self, scene: Scene) -> BoolArray:
        """Return bool [B], whether the task is solved."""

    @abstractmethod
    def expert(self, scene: Scene) -> Floats:
        """Return actions [A, B] of a script without memory that solves the task."""

    def aim(self, scene: Scene) -> Floats:
        """Return [3, B], the first goal of the hand: the body if there is one."""
        return scene.body

    def write(self, columns: NDArray[np.float32], scene: Scene) -> None:
        """Fill the states [S - 16, B] that follow those of the arm."""
        columns[:3] = scene.axis


class ReachTask(Task):
    """The hand reaches a point in space."""

    instruction = REACH_INSTRUCTION

    def joints(self, draws: Floats) -> Floats:
        return start_joints(draws)

    def place(self, rows: IntArray, draws: Floats) -> Floats:
        self.target[:, rows] = reach_target(draws)
        return np.zeros((3, len(rows)))

    def aim(self, scene: Scene) -> Floats:
        return self.target

    def potential(self, scene: Scene) -> Floats:
        return reach_potential(self.target, scene.hand)

    def successes(self, scene: Scene) -> BoolArray:
        return reached(self.target, scene.hand)

    def expert(self, scene: Scene) -> Floats:
        return move_toward(scene.joints, self.target)

    def write(self, columns: NDArray[np.float32], scene: Scene) -> None:
        """See `Task`: there are none."""


class PushTask(Task):
    """The hand pushes a puck to a mark."""

    instruction = "push the puck to the mark"
    body = "puck"
    state_size = REACH_STATES + 9
    draws = 11

    def place(self, rows: IntArray, draws: Floats) -> Floats:
        puck = between(PUCK_LOW, PUCK_HIGH, draws[:2])
        angle = MARK_ANGLE * (2 * draws[2] - 1)
        way = (MARK_NEAR + (MARK_FAR - MARK_NEAR) * draws[3]) * np.stack((np.cos(angle), np.sin(angle)))
        height = np.full((1, len(rows)), PUCK_HALF_HEIGHT)
        self.target[:, rows] = np.vstack((puck + way, height))
        return np.vstack((puck, height))

    def way(self, scene: Scene) -> tuple[Floats, Floats]:
        """Return the vector from the puck to the mark, [2, B] in meters, and its length [B]."""
        way = self.target[:2] - scene.body[:2]
        return way, np.sqrt(np.einsum("db,db->b", way, way))

    def behind(self, scene: Scene) -> Floats:
        """Return [3, B], the places from which the hand pushes the puck toward the mark."""
        way, length = self.way(scene)
        behind = scene.body.copy()
        behind[:2] -= BEHIND * way / np.maximum(length, 1e-6)
        return behind

    def potential(self, scene: Scene) -> Floats:
        """See `Task`: the puck close to the mark, the hand close to its pushing place and pointing down."""
        tilt = 1 + scene.axis[2]
        return -8 * self.way(scene)[1] - 2 * distance(self.behind(scene), scene.hand) - tilt

    def successes(self, scene: Scene) -> BoolArray:
        return self.way(scene)[1] < PUSH_RADIUS

    def expert(self, scene: Scene) -> Floats:
        """See `Task`: above the far side of the puck, down behind it, then through it to the mark."""
        way, length = self.way(scene)
        direction = way / np.maximum(length, 1e-6)
        beside = scene.hand[:2] - scene.body[:2]
        across = np.abs(beside[0] * direction[1] - beside[1] * direction[0])
        lined_up = ((beside * direction).sum(axis=0) < -0.03) & (across < 0.015)
        point = self.behind(scene)
        point[2] = np.where(lined_up, 0.02, 0.09)
        step = BEHIND - 0.05 + np.clip(length, 0, 0.05)
        point[:2] += np.where(lined_up & (scene.hand[2] < 0.04), step, 0) * direction
        return move_toward(scene.joints, point)

    def write(self, columns: NDArray[np.float32], scene: Scene) -> None:
        """See `Task`: the hand's direction, the mark, the vector to it, the puck's velocity."""
        columns[:3] = scene.axis
        columns[3:5] = scaled_position(self.target)[:2]
        columns[5:7] = self.way(scene)[0] / 0.1
        columns[7:9] = scene.velocity[:2]


class PickTask(Task):
    """The fingers grasp a block by contact and lift it by 8 cm."""

    instruction = "pick up the block"
    body = "block"
    state_size = REACH_STATES + 6
    action_size = REACH_ACTIONS + 1
    draws = 9

    def place(self, rows: IntArray, draws: Floats) -> Floats:
        return np.vstack((between(BLOCK_LOW, BLOCK_HIGH, draws[:2]), np.full((1, len(rows)), BLOCK_HALF)))

    def turn(self, places: Floats) -> Floats:
        """See `Task`: one side of a block faces the arm, so that the fingers close on two others."""
        half = np.arctan2(places[1], places[0]) / 2
        return np.stack((np.cos(half), 0 * half, 0 * half, np.sin(half)))

    def potential(self, scene: Scene) -> Floats:
        """See `Task`: the hand near the block and pointing down, the block grasped, and lifted."""
        away = distance(scene.body, scene.hand)
        grasp = 0.5 * np.exp(-((away / GRASP_WIDTH) ** 2)) + 0.5 * scene.held
        lift = np.clip(scene.body[2] - BLOCK_HALF, 0, LIFT_HEIGHT)
        return -2 * away - (1 + scene.axis[2]) + grasp + 20 * lift

    def successes(self, scene: Scene) -> BoolArray:
        return scene.held & (scene.body[2] >= BLOCK_HALF + LIFT_HEIGHT)

    def expert(self, scene: Scene) -> Floats:
        """See `Task`: above the block, down over it, and up with it."""
        goal = scene.hand.copy()
        goal[2] = BLOCK_HALF + LIFT_HEIGHT + 0.04
        return self.carry(scene, goal)

    def carry(self, scene: Scene, goal: Floats) -> Floats:
        """Return actions [8, B] that grasp the block and, once it is held, bring the hand to `goal` [3, B]."""
        above = distance(scene.body[:2], scene.hand[:2])
        point = scene.body.copy()
        # Approach in a narrowing cone, so that no finger lands on the block.
        point[2] += np.clip(3 * (above - 0.006), -0.01, 0.08)
        around = distance(scene.body, scene.hand) < 0.016
        # Lift slowly and straight up, so that the fingers have closed before the block is carried.
        low = scene.body[2] < CARRY_HEIGHT
        way = np.where(low, np.array([0.0, 0.0, 1.0])[:, None], goal - scene.hand)
        way *= np.minimum(1, np.where(low, CARRY_STEP / 2, CARRY_STEP) / np.maximum(np.linalg.norm(way, axis=0), 1e-6))
        moves = move_toward(scene.joints, np.where(scene.held, scene.hand + way, point))
        return np.vstack((moves, gripper_move(around | scene.held)))

    def write(self, columns: NDArray[np.float32], scene: Scene) -> None:
        """See `Task`: the hand's direction, whether the fingers close and hold the block, and their opening."""
        columns[:3] = scene.axis
        columns[3] = scene.closed
        columns[4] = scene.held
        columns[5] = scene.opening / (2 * FINGER_TRAVEL)


class PlaceTask(PickTask):
    """The fingers grasp a block by contact and bring it to a point in space."""

    instruction = "bring the block to the marked point"
    state_size = PickTask.state_size + 6
    draws = 12

    def place(self, rows: IntArray, draws: Floats) -> Floats:
        self.target[:, rows] = between(GOAL_LOW, GOAL_HIGH, draws[2:5])
        return super().place(rows, draws)

    def potential(self, scene: Scene) -> Floats:
        """See `Task`: as `PickTask`, plus the closeness of a held block to the point."""
        near = np.clip(FAR - distance(self.target, scene.body), 0, None)
        return super().potential(scene) + 8 * scene.held * near

    def successes(self, scene: Scene) -> BoolArray:
        return scene.held & (distance(self.target, scene.body) < PLACE_RADIUS)

    def expert(self, scene: Scene) -> Floats:
        return self.carry(scene, self.target + scene.hand - scene.body)

    def write(self, columns: NDArray[np.float32], scene: Scene) -> None:
        """See `Task`: as `PickTask`, then the point and the vector to it from the block."""
        super().write(columns, scene)
        columns[6:9] = scaled_position(self.target)
        columns[9:12] = (self.target - scene.body) / 0.1


TASKS: dict[str, type[Task]] = {"reach": ReachTask, "push": PushTask, "pick": PickTask, "place": PlaceTask}


def move_toward(joints: Array, points: Array) -> NDArray[np.float64]:
    """Return actions [7, B] that lead the hands to points, pointing down.

    Args:
        joints: [7, B], in radians.
        points: [3, B], in metres.
    """
    actions = (step_toward(joints, points) - joints) / ACTION_STEP
    return actions / np.maximum(np.abs(actions).max(axis=0), 1)


def step_toward(joints: Array, points: Array) -> NDArray[np.float64]:
    """Return joints [7, B] that bring the hands closer to points [3, B], pointing down: one step of damped least
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
    """Return [B], the value of an action that closes the gripper, or opens it."""
    return np.where(closes, 1.0, -1.0)
