"""A kinematic Franka arm that reaches for a point or picks up a block: no forces, no contacts, numpy only.

Joints move as commanded, within their limits; the hand cannot go below the table. The block is grasped by proximity: it
follows the hand once the gripper closes within 3 cm of it, pointing down, and falls back to the table when the gripper
opens. That suffices to learn from, and is fast; `franka_mujoco` is the arm with physics.

`FrankaVisionEnv` is the arm seen from above, with an instruction that names which of several colored points to touch:
an image of a few thousand numbers and a sentence, small enough to train a vision-language-action policy on a laptop.
Only the image shows where the points are, and only the sentence tells which one counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_types import FrankaVisionOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import (
    BoolArray,
    EnvSettings,
    EnvSpec,
    FloatArray,
    IntArray,
    Observation,
    Transition,
)
from recipes.embodied.envs.env_state import Starts, State
from recipes.embodied.envs.franka.franka_tasks import gripper_move, move_toward, step_toward
from recipes.embodied.envs.franka.pictures import Spot, draw_arm
from recipes.embodied.interventions.intervention import HandMotion
from recipes.embodied.robots.franka_arm import (
    ACTION_STEP,
    CONTROL_SECONDS,
    GRIPPER_THRESHOLD,
    HOME,
    JOINT_MAX,
    JOINT_MIN,
    REACH_ACTIONS,
    REACH_INSTRUCTION,
    REACH_STATES,
    between,
    check_task,
    distance,
    hand_pose,
    reach_potential,
    reach_target,
    reached,
    scaled_joints,
    scaled_position,
    start_joints,
    steered,
    write_arm_states,
)
from recipes.training.arrays import Array
from rlinf_core.algorithms.options import checked_options

TASKS = ("pick", "reach")
INSTRUCTIONS = {"pick": "pick up the block", "reach": REACH_INSTRUCTION}
# The region of blocks: x forward, y left, z up, in meters.
BLOCK_LOW, BLOCK_HIGH = np.array([0.35, -0.2, 0.02]), np.array([0.6, 0.2, 0.02])
GRASP_RADIUS = 0.03
GRASP_UPRIGHT = 0.9  # smallest cosine between hand and straight down: within 26 degrees
LIFT_HEIGHT = 0.15


class FrankaKinEnv(VectorEnv):
    """Tasks `pick` (default) and `reach`.

    Actions, at 20 Hz: 7 joint velocities, as fractions -1 to 1 of half the published limits; `pick` has an eighth
    number for the gripper, which closes above 0.5, opens below -0.5 and else stays. Observations `states`: joints,
    hand, target, the vector from hand to target; for `pick` also the hand's direction, whether the gripper is closed
    and whether it holds the block; all of magnitude about 1. Rewards are differences of a potential (close to the
    target, and for `pick` pointing down, grasped, lifted), and 1 for success, which ends the episode. Success: the hand
    within 5 cm of the point; the block held 15 cm above the table.
    """

    control_hz = 1 / CONTROL_SECONDS

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        task = settings.task or "pick"
        check_task("franka_kin", task, TASKS, settings.options)
        self._picks = task == "pick"
        self._instructions = np.full(self.num_envs, INSTRUCTIONS[task])
        shape = (3, self.num_envs)
        self._joints = np.tile(HOME[:, None], self.num_envs)
        self._hand = np.zeros(shape)
        self._axis = np.zeros(shape)
        self._target = np.zeros(shape)
        self._closed = np.zeros(self.num_envs, np.bool_)
        self._held = np.zeros(self.num_envs, np.bool_)
        self._was_held = np.zeros(self.num_envs, np.bool_)
        self._potential = np.zeros(self.num_envs)
        self._step_size = ACTION_STEP

    @property
    def spec(self) -> EnvSpec:
        """21 states and 8 actions for `pick`, 16 and 7 for `reach`."""
        if self._picks:
            return EnvSpec(state_size=21, action_size=8, has_instructions=True)
        return EnvSpec(state_size=REACH_STATES, action_size=REACH_ACTIONS, has_instructions=True)

    def _start(self, rows: IntArray, starts: Starts) -> None:
        draws = starts.uniform(10).T
        self._joints[:, rows] = start_joints(draws[:7])
        placed = draws[7:]
        self._target[:, rows] = between(BLOCK_LOW, BLOCK_HIGH, placed) if self._picks else reach_target(placed)
        self._hand[:, rows], self._axis[:, rows] = hand_pose(self._joints[:, rows])
        self._closed[rows] = False
        self._held[rows] = False
        self._was_held[rows] = False
        self._potential[rows] = self._potential_now()[rows]

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        moves = np.clip(actions.T, -1, 1)
        if rows is not None:
            resting = np.ones(self.num_envs, np.bool_)
            resting[rows] = False
            moves = np.where(resting, 0, moves)
        self._move(moves[:7])
        if self._picks:
            self._grip(moves[7])
        before = self._potential
        self._potential = self._potential_now()
        successes = self._successes()
        rewards = self._potential - before + successes
        return Transition(rewards.astype(np.float32), successes, None, successes)

    def _move(self, velocities: Array) -> None:
        joints = np.clip(self._joints + self._step_size * velocities, JOINT_MIN[:, None], JOINT_MAX[:, None])
        hand, axis = hand_pose(joints)
        free = hand[2] > 0
        if free.all():
            self._joints, self._hand, self._axis = joints, hand, axis
        else:
            self._joints = np.where(free, joints, self._joints)
            self._hand = np.where(free, hand, self._hand)
            self._axis = np.where(free, axis, self._axis)

    def _grip(self, command: Array) -> None:
        closes, opens = command > GRIPPER_THRESHOLD, command < -GRIPPER_THRESHOLD
        # Fingers that are already closed cannot grasp the block.
        near = (distance(self._target, self._hand) < GRASP_RADIUS) & (self._axis[2] < -GRASP_UPRIGHT)
        grasps = closes & ~self._closed & near
        self._closed = (self._closed | closes) & ~opens
        self._held = (self._held | grasps) & self._closed
        self._was_held |= self._held
        self._target = np.where(self._held, self._hand, self._target)
        self._target[2] = np.where(self._held, self._target[2], BLOCK_LOW[2])

    def _lift(self) -> NDArray[np.float64]:
        """Return the height of the held block as a share of the height for success."""
        return np.clip((self._target[2] - BLOCK_LOW[2]) / LIFT_HEIGHT, 0, 1)

    def _potential_now(self) -> NDArray[np.float64]:
        way = reach_potential(self._target, self._hand)
        if not self._picks:
            return way
        tilt = 1 + self._axis[2]
        return np.where(self._held, 1 + 2 * self._lift(), way - tilt)

    def _successes(self) -> BoolArray:
        if self._picks:
            return self._held & (self._target[2] >= BLOCK_LOW[2] + LIFT_HEIGHT)
        return reached(self._target, self._hand)

    def expert(self) -> FloatArray:
        """See `VectorEnv`: to the point; or to the block, close, and up."""
        if not self._picks:
            return move_toward(self._joints, self._target).T.astype(np.float32)
        lifted = self._hand + np.array([0.0, 0.0, LIFT_HEIGHT])[:, None]
        near = distance(self._target, self._hand) < GRASP_RADIUS / 2
        moves = move_toward(self._joints, np.where(self._held, lifted, self._target))
        grip = gripper_move(self._held | (near & ~self._closed))
        return np.vstack((moves, grip)).T.astype(np.float32)

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """See `VectorEnv`: the motion of the hand, by the arm's kinematics."""
        return steered(self._joints[:, row], motion, grips=self._picks)

    def gripper_is_closed(self, row: int) -> bool:
        return bool(self._closed[row])

    def _failures(self) -> NDArray[np.str_] | None:
        if not self._picks:
            return None
        return np.where(self._held, "not lifted", np.where(self._was_held, "dropped", "not grasped"))

    def look(self, rows: IntArray) -> State:
        return {"joints": self._joints[:, rows].T, "target": self._target[:, rows].T, "closed": self._closed[rows]}

    def picture(self, seen: State) -> NDArray[np.uint8]:
        """See `VectorEnv`: from the side and from above; the block red, a point to reach green."""
        target = Spot(seen["target"].T, 0.02, "red" if self._picks else "green")
        return draw_arm(seen["joints"].T, [target], seen["closed"])

    def _save(self) -> State:
        return {
            "joints": self._joints.T,
            "target": self._target.T,
            "closed": self._closed,
            "held": self._held,
            "potential": self._potential,
        }

    def _load(self, state: State) -> None:
        self._joints = state["joints"].T.copy()
        self._target = state["target"].T.copy()
        self._closed, self._held, self._potential = (state[name].copy() for name in ("closed", "held", "potential"))
        self._hand, self._axis = hand_pose(self._joints)

    def _observe(self) -> Observation:
        states: FloatArray = np.empty((self.num_envs, self.spec.state_size), np.float32)
        columns = states.T
        write_arm_states(columns, self._joints, self._hand, self._target)
        if self._picks:
            columns[16:19] = self._axis
            columns[19] = self._closed
            columns[20] = self._held
        return {"states": states, "instructions": self._instructions}


_VISION_TASKS: Final = ("touch",)
COLORS: Final = {"red": (230, 40, 40), "blue": (50, 80, 230), "green": (40, 180, 60), "yellow": (230, 210, 40)}
INSTRUCTION: Final = "touch the {color} point"
# The region of points, and their least distance from each other, in meters.
POINT_LOW, POINT_HIGH, APART = np.array([0.35, -0.2]), np.array([0.6, 0.2]), 0.12
POINT_HEIGHT: Final = 0.3
HAND_STEP: Final = 0.04  # motion of the hand by an action of 1, in meters
# Reward per meter: step rewards then weigh about as much as success, which would otherwise hide the direction.
METRE_REWARD: Final = 10.0
# The camera's view of the plane of the points: x upward, y to the left, in meters.
SEEN_LOW, SEEN_HIGH = np.array([0.25, -0.3]), np.array([0.7, 0.3])
POINT_RADIUS, HAND_RADIUS, ARM_WIDTH = 0.035, 0.022, 0.015
_TABLE, _ARM, _HAND = (200, 195, 185), (110, 110, 120), (20, 20, 20)
_VISION_STATES: Final = 10
_ATTEMPTS: Final = 8


class FrankaVisionEnv(VectorEnv):
    """The task `touch`: bring the hand within 5 cm of the point whose color the instruction names.

    Actions, at 20 Hz: the motion of the hand along x, y and z, -1 to 1 for 4 cm; the hand stays pointing down.
    Observations: `images.main` uint8 [H, W, 3] from above, `states` (joints and hand) and `instructions`. Rewards are
    differences of the distance to that point, 10 per meter, and 1 for success, which ends the episode.

    Options: `image_size`, 32 pixels by default; `points`, their number, 2 by default, at most 4.
    """

    control_hz = 1 / CONTROL_SECONDS

    options_model = FrankaVisionOptions

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        known = " ".join(FrankaVisionOptions.model_fields)
        check_task("franka_vision", settings.task or _VISION_TASKS[0], _VISION_TASKS, settings.options, known)
        options: FrankaVisionOptions = checked_options(type(self), settings.options, "env.train.options")
        self._size, self._points = options.image_size, options.points
        count = self.num_envs
        self._joints = np.zeros((7, count))
        self._hand = np.zeros((3, count))
        self._axis = np.zeros((3, count))
        # The places [P, 3, B], and the index of the point that counts.
        self._places = np.zeros((self._points, 3, count))
        self._named = np.zeros(count, np.int64)
        self._potential = np.zeros(count)
        self._colors = list(COLORS)[: self._points]
        self._texts = np.array([INSTRUCTION.format(color=color) for color in self._colors])

    @property
    def spec(self) -> EnvSpec:
        """10 states, 3 actions, one camera, an instruction."""
        return EnvSpec(_VISION_STATES, 3, cameras={"main": (self._size, self._size, 3)}, has_instructions=True)

    @property
    def _target(self) -> NDArray[np.float64]:
        """[3, B], in meters."""
        return self._places[self._named, :, np.arange(self.num_envs)].T

    def _start(self, rows: IntArray, starts: Starts) -> None:
        draws = starts.uniform(8 + 2 * _ATTEMPTS * self._points).T
        self._joints[:, rows] = start_joints(draws[:7])
        self._named[rows] = (draws[7] * self._points).astype(np.int64)
        self._places[:, :2, rows] = _apart(draws[8:].reshape(_ATTEMPTS, self._points, 2, len(rows)))
        self._places[:, 2, rows] = POINT_HEIGHT
        self._hand, self._axis = hand_pose(self._joints)
        self._potential[rows] = _potential(self._target, self._hand)[rows]

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        moved = step_toward(self._joints, self._hand + HAND_STEP * np.clip(actions.T, -1, 1))
        chosen = slice(None) if rows is None else rows
        self._joints[:, chosen] = np.clip(moved, JOINT_MIN[:, None], JOINT_MAX[:, None])[:, chosen]
        self._hand, self._axis = hand_pose(self._joints)
        before, self._potential = self._potential, _potential(self._target, self._hand)
        successes = reached(self._target, self._hand)
        return Transition((self._potential - before + successes).astype(np.float32), successes, None, successes)

    def expert(self) -> FloatArray:
        """See `VectorEnv`: straight to the point."""
        way = (self._target - self._hand) / HAND_STEP
        return (way / np.maximum(np.abs(way).max(axis=0), 1)).T.astype(np.float32)

    def _save(self) -> State:
        return {
            "joints": self._joints.T,
            "places": self._places.transpose(2, 0, 1),
            "named": self._named,
            "potential": self._potential,
        }

    def _load(self, state: State) -> None:
        self._joints = state["joints"].T.copy()
        self._places = state["places"].transpose(1, 2, 0).copy()
        self._named, self._potential = state["named"].copy(), state["potential"].copy()
        self._hand, self._axis = hand_pose(self._joints)

    def _observe(self) -> Observation:
        states: FloatArray = np.empty((self.num_envs, _VISION_STATES), np.float32)
        states.T[:7], states.T[7:] = scaled_joints(self._joints), scaled_position(self._hand)
        return {"states": states, "images.main": self._picture(), "instructions": self._texts[self._named]}

    def _picture(self) -> NDArray[np.uint8]:
        """Return the camera's image, uint8 [B, H, W, 3]; edges are antialiased, so that it shows subpixel positions."""
        size = self._size
        steps = (np.arange(size, dtype=np.float32) + 0.5) / size
        # Rows go from far to near, columns from left to right.
        low, high = SEEN_LOW.astype(np.float32), SEEN_HIGH.astype(np.float32)
        x = (high[0] - (high[0] - low[0]) * steps)[None, :, None]
        y = (high[1] - (high[1] - low[1]) * steps)[None, None, :]
        pixel = (high[0] - low[0]) / size
        hand_x, hand_y = _column(self._hand[0]), _column(self._hand[1])
        # The arm as a bar from the base, at the origin, to the hand.
        length = np.hypot(hand_x, hand_y)
        across = np.abs(x * (hand_y / length) - y * (hand_x / length))
        beyond = x * (hand_x / length) + y * (hand_y / length) - length
        # The signed distance of a pixel from an outline, in meters, negative inside. Earlier shapes cover later ones.
        outlines = [
            (_distance(x - hand_x, y - hand_y) - HAND_RADIUS, _HAND),
            (np.maximum(across - ARM_WIDTH, beyond), _ARM),
        ]
        for place, color in reversed(list(zip(self._places, self._colors, strict=True))):
            outlines.append((_distance(x - _column(place[0]), y - _column(place[1])) - POINT_RADIUS, COLORS[color]))
        shares = np.empty((self.num_envs, size, size, len(outlines) + 1), np.float32)
        left = shares[..., -1]
        left[...] = 1
        for index, (away, _) in enumerate(outlines):
            np.multiply(left, np.clip(0.5 - away / pixel, 0, 1), out=shares[..., index])
            left -= shares[..., index]
        palette = np.array([*(color for _, color in outlines), _TABLE], np.float32)
        return (shares @ palette).round().astype(np.uint8)


def _potential(target: Array, hand: Array) -> NDArray[np.float64]:
    """Return the potential [B] whose differences are the rewards."""
    return -METRE_REWARD * distance(target, hand)


def _column(values: Array) -> NDArray[np.float32]:
    return values[:, None, None].astype(np.float32)


def _distance(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.sqrt(x * x + y * y)


def _apart(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return places [P, 2, n] of points: the first of several attempts [T, P, 2, n] whose points lie apart."""
    attempts = POINT_LOW[:, None] + (POINT_HIGH - POINT_LOW)[:, None] * draws
    nearest = np.full((len(attempts), attempts.shape[-1]), np.inf)
    for first in range(attempts.shape[1]):
        for second in range(first):
            nearest = np.minimum(nearest, np.linalg.norm(attempts[:, first] - attempts[:, second], axis=1))
    good = nearest > APART
    # If none is good, the attempt with the largest distance.
    chosen = np.asarray(np.where(good.any(axis=0), good.argmax(axis=0), nearest.argmax(axis=0)), np.int64)
    return attempts[chosen, :, :, np.arange(attempts.shape[-1])].transpose(1, 2, 0)
