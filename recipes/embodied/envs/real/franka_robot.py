"""A Franka arm, real or simulated by a controller: one environment on the arm that the process owns.

An arm is held by one process at a time, and by one connection within it: the environments of training and evaluation
that a worker holds take turns on it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.franka.drawing import Spot, draw_arm
from recipes.embodied.envs.real.assigned_robot import own_robot
from recipes.embodied.envs.starts import Starts
from recipes.embodied.interventions.intervention import CameraView, HandMotion
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import (
    ACTION_STEP,
    REACH_ACTIONS,
    REACH_INSTRUCTION,
    REACH_STATES,
    check_task,
    points_within,
    reach_potential,
    reach_target,
    reached,
    start_within,
    write_arm_states,
)
from recipes.embodied.robots.franka_kinematics import HOME, hand_pose
from recipes.embodied.robots.replies import ArmState
from recipes.embodied.robots.robot_errors import RobotLateError
from recipes.embodied.robots.robot_session import check_arm, refuse_faults, watch_cameras
from recipes.embodied.robots.steering import steered
from rlinf_core.hardware.robots.franka import Franka

TASKS = ("reach",)
SPEC = EnvSpec(REACH_STATES, REACH_ACTIONS, has_instructions=True)
# Seconds to wait for an arm: a run that starts again finds it held by workers that are just ending.
LEASE_PATIENCE = 10.0
LATE_IN_A_ROW = 10
_POINT_RADIUS = 0.015  # metres, as it is drawn
_SAME = 1e-4  # of an action, by which what was carried out may differ by rounding alone
_log = logging.getLogger("rlinf.robots")


class _SharedArm:
    """The connection of this process to one arm, and the environment that moved it last."""

    def __init__(self, arm: Franka) -> None:
        self.arm, self.client = arm, FrankaClient(arm)
        try:
            if not arm.disable_validate:
                checks = check_arm(self.client, arm)
                # Whoever holds it may be just ending: `acquire` waits.
                refuse_faults(self.client, [check for check in checks if check.name != "lease"])
            self.client.acquire(LEASE_PATIENCE)
        except BaseException:
            self.client.close()
            raise
        self.users: set[int] = set()
        self.mover: object = None


_arms: dict[tuple[str, int], _SharedArm] = {}


class FrankaRobotEnv(VectorEnv):
    """Task `reach`, with the actions, observations and rewards of `franka_kin`, in real time.

    Its settings' `hardware` is the one arm that the process owns, so `num_envs` is 1: as many env workers as arms. A
    start moves the arm to its place, within its `workspace`, in which points to reach are, too. Needs the arm's
    controller from the first moment on, and its checks to be good.

    An action moves the target of the arm, which may lag behind it. What counts as executed is the change of the target
    that the controller accepted: lag is not a limit.

    An action that was under way for too long is not carried out, and told; `LATE_IN_A_ROW` of them end the run.
    """

    alters_actions = True
    paces_itself = True

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        check_task("franka_robot", settings.task or "reach", TASKS, settings.options)
        arm = own_robot(settings, Franka, env_type="franka_robot", hardware="Franka", noun="arm")
        points_within(arm.workspace)
        self._key = (arm.robot_ip, arm.robot_port)
        if self._key not in _arms or _arms[self._key].client.closed:
            _arms[self._key] = _SharedArm(arm)
        self._arm = _arms[self._key]
        self._arm.users.add(id(self))
        self._joints = HOME[:, None].copy()
        self._accepted = HOME.copy()
        self._target = np.zeros((3, 1))
        self._hand = np.zeros((3, 1))
        self._potential = np.zeros(1)
        self._late = 0
        self._seen_at = time.monotonic()  # when the joints were measured

    @property
    def spec(self) -> EnvSpec:
        """16 states and 7 actions."""
        return SPEC

    def close(self) -> None:
        """Release the arm, unless another environment of this process uses it."""
        self._arm.users.discard(id(self))
        if not self._arm.users and _arms.get(self._key) is self._arm:
            del _arms[self._key]
            self._arm.client.close()

    def _start(self, rows: IntArray, starts: Starts) -> None:
        draws = starts.uniform(10).T
        workspace = self._arm.arm.workspace
        self._target = reach_target(draws[7:], workspace)
        self._take(start_within(draws[:7], workspace)[:, 0])
        self._potential = reach_potential(self._target, self._hand)

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        if self._arm.mover is not self:
            self._take(self._joints[:, 0])
        begun = self._accepted
        deltas = np.clip(actions[0], -1, 1) * ACTION_STEP[:, 0]
        self._see(self._moved(deltas))
        # What a limit or a late action left of it.
        done = ((self._accepted - begun) / ACTION_STEP[:, 0]).astype(np.float32)
        kept = np.abs(done - actions[0]) < _SAME
        executed = np.where(kept, actions[0], np.clip(done, -1, 1))[None]
        before, self._potential = self._potential, reach_potential(self._target, self._hand)
        successes = reached(self._target, self._hand)
        rewards = (self._potential - before + successes).astype(np.float32)
        return Transition(rewards, successes, None, successes, executed)

    def _moved(self, deltas: NDArray[np.float64]) -> ArmState:
        """Return the state of the arm after an action."""
        client = self._arm.client
        try:
            state = client.move(deltas)
            self._late = 0
        except RobotLateError as error:
            self._late += 1
            if self._late >= LATE_IN_A_ROW:
                raise
            _log.warning("%s", error)
            state = client.state()
        watch_cameras(client, self._arm.arm, state)
        return state

    def _take(self, joints: NDArray[np.float64]) -> None:
        """Move the arm to the joint positions that this environment expects."""
        self._see(self._arm.client.reset(joints))
        self._arm.mover = self

    def _see(self, state: ArmState) -> None:
        self._accepted, self._joints = state.target, state.joints[:, None]
        self._hand = hand_pose(self._joints)[0]
        self._seen_at = time.monotonic()

    def views(self, row: int) -> list[CameraView]:
        """See `VectorEnv`: a drawing of the measured joints and the point to reach, as old as they are."""
        spots = [Spot(self._target, _POINT_RADIUS, "green")]
        return [CameraView("joints", draw_arm(self._joints, spots, np.zeros(1, np.bool_))[0], self._seen_at)]

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """See `VectorEnv`: the motion of the hand, by the arm's kinematics."""
        return steered(self._joints[:, 0], motion, grips=False)

    def _observe(self) -> Observation:
        states: FloatArray = np.empty((1, REACH_STATES), np.float32)
        write_arm_states(states.T, self._joints, self._hand, self._target)
        return {"states": states, "instructions": np.full(1, REACH_INSTRUCTION)}
