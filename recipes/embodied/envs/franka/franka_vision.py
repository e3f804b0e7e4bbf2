"""A kinematic Franka arm seen from above, with an instruction that names which of several colored points to touch.

An image of a few thousand numbers and a sentence, both made with numpy: small enough to train a vision-language-action
policy on a laptop. Only the image shows where the points are, and only the sentence tells which one counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_types import FrankaVisionOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts, State
from recipes.embodied.envs.franka.franka_tasks import step_toward
from recipes.embodied.robots.franka_arm import (
    CONTROL_SECONDS,
    JOINT_MAX,
    JOINT_MIN,
    check_task,
    distance,
    hand_pose,
    reached,
    scaled_joints,
    scaled_position,
    start_joints,
)
from recipes.training.arrays import Array
from rlinf_core.algorithms.options import checked_options

TASKS: Final = ("touch",)
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
STATES: Final = 10
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
        check_task("franka_vision", settings.task or TASKS[0], TASKS, settings.options, known)
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
        return EnvSpec(STATES, 3, cameras={"main": (self._size, self._size, 3)}, has_instructions=True)

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
        states: FloatArray = np.empty((self.num_envs, STATES), np.float32)
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
