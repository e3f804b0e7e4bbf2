"""A kinematic Franka arm that reaches for a point or picks up a block: no forces, no contacts, numpy only.

Joints move as commanded, within their limits; the hand cannot go below the table. The block is grasped by proximity: it
follows the hand once the gripper closes within 3 cm of it, pointing down, and falls back to the table when the gripper
opens. That suffices to learn from, and is fast; `franka_mujoco` is the arm with physics.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
from recipes.embodied.envs.franka.franka_tasks import gripper_move, move_toward
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
    start_joints,
    steered,
    write_arm_states,
)
from recipes.training.arrays import Array

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
