"""The Franka arm with physics and contacts, in MuJoCo: it reaches, pushes a puck, picks up a block or carries it away.

The simulator state of all environments is one array, which MuJoCo's `rollout` advances by one action in a single call.
A start writes a row, a resting environment's row is left out, and environments never affect each other.
"""

# MuJoCo is an optional package, whose binary modules are untyped.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import cast

import mujoco
import numpy as np
from mujoco import rollout
from numpy.typing import NDArray

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts, State
from recipes.embodied.envs.franka.franka_mjcf import BLOCK_HALF, FINGER_TRAVEL, PUCK_RADIUS, TIMESTEP, mjcf
from recipes.embodied.envs.franka.franka_tasks import TASKS, PlaceTask, Scene
from recipes.embodied.envs.franka.pictures import Spot, draw_arm
from recipes.embodied.interventions.intervention import HandMotion
from recipes.embodied.robots.franka_arm import (
    ACTION_STEP,
    ACTION_VELOCITY,
    CONTROL_SECONDS,
    GRIPPER_THRESHOLD,
    JOINT_MAX,
    JOINT_MIN,
    REACH_STATES,
    check_task,
    hand_pose,
    steered,
    write_arm_states,
)
from recipes.training.arrays import Array

SUBSTEPS = round(CONTROL_SECONDS / TIMESTEP)
# The force above which a finger counts as pressing, in newtons.
TOUCH_FORCE = 0.5


class FrankaMujocoEnv(VectorEnv):
    """Tasks `reach` (default), `push`, `pick` and `place`.

    Actions, at 20 Hz: 7 joint velocities, as fractions -1 to 1 of half the published limits; `pick` and `place` have an
    eighth number for the gripper, which closes above 0.5, opens below -0.5 and else stays. Observations `states`: those
    of `franka_kin` for `reach`; in the other tasks the target of the hand is the puck or block, and the states of
    `Task.write` follow. Rewards are differences of a potential, `Task.potential`, and 1 for success, which ends the
    episode. Success: the hand within 5 cm of the point; the puck within 4 cm of the mark; the block held 8 cm above the
    table; the block held within 4 cm of the point. A block is held when both fingers press against it.
    """

    control_hz = 1 / CONTROL_SECONDS

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        name = settings.task or "reach"
        check_task("franka_mujoco", name, tuple(TASKS), settings.options)
        self._task = task = TASKS[name](self.num_envs)
        self._instructions = np.full(self.num_envs, task.instruction)
        self._model = model = mujoco.MjModel.from_xml_string(mjcf(task.body))
        self._scratch = mujoco.MjData(model)
        kind = mujoco.mjtState.mjSTATE_FULLPHYSICS
        self._rest = np.zeros(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, self._scratch, self._rest, kind)
        self._state = np.tile(self._rest, (self.num_envs, 1))
        # Offsets in that state: the time, then positions, then velocities.
        self._grasps = model.nsensor == 2
        first, self._fingers = 8, slice(8, 10)
        if self._grasps:
            first = self._fingers.stop
            self._rest[self._fingers] = FINGER_TRAVEL
        self._body = slice(first, first + 3) if task.body else None
        speed = 1 + model.nq + first - 1
        self._speed = slice(speed, speed + 3) if task.body else None
        zeros = np.zeros((3, self.num_envs))
        flags = np.zeros(self.num_envs, np.bool_)
        self._scene = Scene(zeros, zeros, zeros, zeros, zeros, zeros[0], flags, flags.copy())
        self._potential = np.zeros(self.num_envs)
        self._was_held = flags.copy()

    @property
    def spec(self) -> EnvSpec:
        """16 states and 7 actions for `reach`, 25 and 7 for `push`, 22 and 8 for `pick`, 28 and 8 for `place`."""
        return EnvSpec(self._task.state_size, self._task.action_size, has_instructions=True)

    def _start(self, rows: IntArray, starts: Starts) -> None:
        draws = starts.uniform(self._task.draws).T
        self._state[rows] = self._rest
        self._state[rows, 1:8] = self._task.joints(draws[:7]).T
        bodies = self._task.place(rows, draws[7:])
        if self._body is not None:
            turns = slice(self._body.stop, self._body.stop + 4)
            self._state[rows, self._body], self._state[rows, turns] = bodies.T, self._task.turn(bodies).T
        self._scene.closed[rows] = False
        self._was_held[rows] = False
        self._look(rows, np.zeros((len(rows), 2)))
        self._potential[rows] = self._task.potential(self._scene)[rows]

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        chosen = slice(None) if rows is None else rows
        moves = np.clip(actions[chosen].T, -1, 1)
        commands = moves[:7] * ACTION_VELOCITY
        joints = self._scene.joints[:, chosen]
        # Like the arm's own controller, drive no joint beyond its range.
        room = ACTION_VELOCITY / ACTION_STEP
        commands = np.clip(commands, (JOINT_MIN[:, None] - joints) * room, (JOINT_MAX[:, None] - joints) * room)
        if self._grasps:
            closed = (self._scene.closed[chosen] | (moves[7] > GRIPPER_THRESHOLD)) & (moves[7] >= -GRIPPER_THRESHOLD)
            self._scene.closed[chosen] = closed
            width = np.where(closed, 0.0, FINGER_TRAVEL)
            commands = np.concatenate((commands, width[None], width[None]))
        controls = np.repeat(commands.T[:, None], SUBSTEPS, axis=1)
        states, sensed = rollout.rollout(self._model, self._scratch, self._state[chosen], controls)
        self._state[chosen] = cast("NDArray[np.float64]", states)[:, -1]
        self._look(chosen, cast("NDArray[np.float64]", sensed)[:, -1])
        if self._grasps:
            self._was_held |= self._scene.held
        before, self._potential = self._potential, self._task.potential(self._scene)
        successes = self._task.successes(self._scene)
        return Transition((self._potential - before + successes).astype(np.float32), successes, None, successes)

    def _look(self, rows: IntArray | slice, sensed: NDArray[np.float64]) -> None:
        """Read the scene from the simulator's state; `sensed` [n, 2] are the forces on the fingers of `rows`."""
        scene, state = self._scene, self._state.T
        scene.joints = state[1:8]
        scene.hand, scene.axis = hand_pose(scene.joints)
        if self._body is not None and self._speed is not None:
            scene.body, scene.velocity = state[self._body], state[self._speed]
        if self._grasps:
            scene.opening = state[self._fingers].sum(axis=0)
            scene.touched[rows] = (sensed > TOUCH_FORCE).all(axis=1)

    def expert(self) -> FloatArray:
        return self._task.expert(self._scene).T.astype(np.float32)

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """See `VectorEnv`: the motion of the hand, by the arm's kinematics."""
        return steered(self._scene.joints[:, row], motion, grips=self._grasps)

    def gripper_is_closed(self, row: int) -> bool:
        return bool(self._scene.closed[row])

    def _failures(self) -> NDArray[np.str_] | None:
        if not self._grasps:
            return None
        goes_on = "not placed" if isinstance(self._task, PlaceTask) else "not lifted"
        return np.where(self._scene.held, goes_on, np.where(self._was_held, "dropped", "not grasped"))

    def look(self, rows: IntArray) -> State:
        scene = self._scene
        arrays = {"joints": scene.joints, "body": scene.body, "target": self._task.target}
        return {**{name: array[:, rows].T for name, array in arrays.items()}, "closed": scene.closed[rows]}

    def picture(self, seen: State) -> NDArray[np.uint8]:
        """See `VectorEnv`: from the side and from above; the puck or block red, points to reach green."""
        spots: list[Spot] = []
        if not self._grasps or isinstance(self._task, PlaceTask):
            spots.append(Spot(seen["target"].T, 0.015, "green"))
        if self._body is not None:
            spots.append(Spot(seen["body"].T, BLOCK_HALF if self._grasps else PUCK_RADIUS, "red"))
        return draw_arm(seen["joints"].T, spots, seen["closed"])

    def _save(self) -> State:
        return {
            "simulator": self._state,
            "target": self._task.target.T,
            "potential": self._potential,
            "closed": self._scene.closed,
            "touched": self._scene.touched,
        }

    def _load(self, state: State) -> None:
        self._state = state["simulator"].copy()
        self._task.target, self._potential = state["target"].T.copy(), state["potential"].copy()
        self._scene.closed, self._scene.touched = state["closed"].copy(), state["touched"].copy()
        self._look(slice(0, 0), np.zeros((0, 2)))

    def _observe(self) -> Observation:
        states: FloatArray = np.empty((self.num_envs, self.spec.state_size), np.float32)
        columns, scene = states.T, self._scene
        write_arm_states(columns, scene.joints, scene.hand, self._task.aim(scene))
        self._task.write(columns[REACH_STATES:], scene)
        return {"states": states, "instructions": self._instructions}
