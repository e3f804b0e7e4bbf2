"""The Franka arm with physics and contacts, in MuJoCo: it reaches for a point or pushes a puck to a mark.

The simulator's state of all environments is one array, and MuJoCo's `rollout` carries it forward for one action in a
single call. So a start is a row written, a resting environment a row left out, and what happens to one environment
never depends on its neighbours.
"""

# MuJoCo is an optional package, whose binary modules have no types.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, cast

import mujoco
import numpy as np
from mujoco import rollout
from numpy.typing import NDArray

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.franka_mjcf import PUCK_HALF_HEIGHT, PUCK_RADIUS, TIMESTEP, mjcf
from recipes.embodied.envs.starts import Starts
from recipes.embodied.envs.state import State
from recipes.embodied.envs.types import BoolArray, EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.robots.franka_arm import (
    ACTION_STEP,
    ACTION_VELOCITY,
    CONTROL_SECONDS,
    REACH_ACTIONS,
    REACH_INSTRUCTION,
    REACH_STATES,
    check_task,
    distance,
    reach_potential,
    reach_target,
    reached,
    scaled_position,
    start_joints,
    write_arm_states,
)
from recipes.embodied.robots.franka_kinematics import JOINT_MAX, JOINT_MIN, hand_pose

TASKS = ("reach", "push")
INSTRUCTIONS = {"reach": REACH_INSTRUCTION, "push": "push the puck to the mark"}
SUBSTEPS = round(CONTROL_SECONDS / TIMESTEP)
# The hand pointing down at x = 0.40 m, z = 0.10 m, where pushing begins.
LOW_HOME = np.array([0.0, 0.0654, 0.0, -2.7266, 0.0, 2.7921, np.pi / 4])
LOW_NOISE = 0.03
# Where pucks lie, and how far from there in which direction (radians from straight ahead) the mark is; in metres.
PUCK_LOW, PUCK_HIGH = np.array([0.45, -0.12]), np.array([0.52, 0.12])
MARK_NEAR, MARK_FAR, MARK_ANGLE = 0.1, 0.18, np.pi / 3
PUSH_RADIUS = 0.04
BEHIND = PUCK_RADIUS + 0.02  # from the puck's middle to where the hand pushes best
PUSH_STATES = REACH_STATES + 9
# Places in the state of the simulator: time, positions (joints, the puck's place and turn), velocities.
_JOINTS, _PUCK = slice(1, 8), slice(8, 11)
_PUCK_SPEED = slice(22, 24)


class FrankaMujocoEnv(VectorEnv):
    """Tasks `reach` (default) and `push`.

    Actions, at 20 Hz: 7 joint velocities, -1 to 1 of half the published limits. Observations `states` of `reach` are
    those of `franka_kin`; `push` has the puck as target of the hand, and then where the hand points, the mark, the way
    from puck to mark and the puck's velocity. Rewards are differences of a potential (nearer to the point; puck nearer
    to the mark, hand nearer to where it can push the puck there, pointing down), and 1 for success, which ends the
    episode. Success: the hand within 5 cm of the point; the puck within 4 cm of the mark.
    """

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        task = settings.task or "reach"
        check_task("franka_mujoco", task, TASKS, settings.options)
        self._pushes = task == "push"
        self._instructions = np.full(self.num_envs, INSTRUCTIONS[task])
        self._model = mujoco.MjModel.from_xml_string(mjcf(puck=self._pushes))
        self._scratch = mujoco.MjData(self._model)
        kind = mujoco.mjtState.mjSTATE_FULLPHYSICS
        self._rest = np.zeros(mujoco.mj_stateSize(self._model, kind))
        mujoco.mj_getState(self._model, self._scratch, self._rest, kind)
        self._state = np.tile(self._rest, (self.num_envs, 1))
        self._target = np.zeros((3, self.num_envs))
        self._hand = np.zeros((3, self.num_envs))
        self._axis = np.zeros((3, self.num_envs))
        self._potential = np.zeros(self.num_envs)

    @property
    def spec(self) -> EnvSpec:
        """16 states and 7 actions for `reach`, 25 and 7 for `push`."""
        states = PUSH_STATES if self._pushes else REACH_STATES
        return EnvSpec(states, REACH_ACTIONS, has_instructions=True)

    def _start(self, rows: IntArray, starts: Starts) -> None:
        draws = starts.uniform(11)
        self._state[rows] = self._rest
        if self._pushes:
            self._state[rows, _JOINTS] = LOW_HOME + LOW_NOISE * (2 * draws[:, :7] - 1)
            puck = PUCK_LOW + (PUCK_HIGH - PUCK_LOW) * draws[:, 7:9]
            self._state[rows, _PUCK] = np.column_stack((puck, np.full(len(rows), PUCK_HALF_HEIGHT)))
            angle = MARK_ANGLE * (2 * draws[:, 9] - 1)
            way = (MARK_NEAR + (MARK_FAR - MARK_NEAR) * draws[:, 10]) * np.stack((np.cos(angle), np.sin(angle)))
            self._target[:, rows] = np.vstack((puck.T + way, np.full(len(rows), PUCK_HALF_HEIGHT)))
        else:
            self._state[rows, _JOINTS] = start_joints(draws[:, :7].T).T
            self._target[:, rows] = reach_target(draws[:, 7:10].T)
        self._look()
        self._potential[rows] = self._potential_now()[rows]

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        chosen = slice(None) if rows is None else rows
        commands = np.clip(actions[chosen].T, -1, 1) * ACTION_VELOCITY
        joints = self._joints[:, chosen]
        # As the arm's own controller: no joint is driven beyond its range.
        room = ACTION_VELOCITY / ACTION_STEP
        commands = np.clip(commands, (JOINT_MIN[:, None] - joints) * room, (JOINT_MAX[:, None] - joints) * room)
        controls = np.repeat(commands.T[:, None], SUBSTEPS, axis=1)
        states, _ = rollout.rollout(self._model, self._scratch, self._state[chosen], controls)
        self._state[chosen] = cast("NDArray[np.float64]", states)[:, -1]
        self._look()
        before, self._potential = self._potential, self._potential_now()
        successes = self._successes()
        return Transition((self._potential - before + successes).astype(np.float32), successes, None, successes)

    @property
    def _joints(self) -> NDArray[np.float64]:
        """[7, B], in radians."""
        return self._state[:, _JOINTS].T

    @property
    def _puck(self) -> NDArray[np.float64]:
        """[3, B], in metres."""
        return self._state[:, _PUCK].T

    def _look(self) -> None:
        self._hand, self._axis = hand_pose(self._joints)

    def _way(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """From the puck to the mark: [2, B] in metres, and its length [B]."""
        way = self._target[:2] - self._puck[:2]
        return way, np.sqrt(np.einsum("db,db->b", way, way))

    def _behind(self) -> NDArray[np.float64]:
        """Return [3, B], where the hand stands to push the puck toward the mark."""
        way, length = self._way()
        behind = self._puck.copy()
        behind[:2] -= BEHIND * way / np.maximum(length, 1e-6)
        return behind

    def _potential_now(self) -> NDArray[np.float64]:
        if not self._pushes:
            return reach_potential(self._target, self._hand)
        tilt = 1 + self._axis[2]
        return -8 * self._way()[1] - 2 * distance(self._behind(), self._hand) - tilt

    def _successes(self) -> BoolArray:
        if not self._pushes:
            return reached(self._target, self._hand)
        return self._way()[1] < PUSH_RADIUS

    def _save(self) -> State:
        return {"simulator": self._state, "target": self._target.T, "potential": self._potential}

    def _load(self, state: State) -> None:
        self._state = state["simulator"].copy()
        self._target, self._potential = state["target"].T.copy(), state["potential"].copy()
        self._look()

    def _observe(self) -> Observation:
        states: FloatArray = np.empty((self.num_envs, self.spec.state_size), np.float32)
        columns = states.T
        write_arm_states(columns, self._joints, self._hand, self._puck if self._pushes else self._target)
        if self._pushes:
            columns[16:19] = self._axis
            columns[19:21] = scaled_position(self._target)[:2]
            columns[21:23] = self._way()[0] / 0.1
            columns[23:25] = self._state[:, _PUCK_SPEED].T
        return {"states": states, "instructions": self._instructions}
