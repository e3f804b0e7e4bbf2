"""A Franka arm, real or simulated by a controller: one environment on the arm that the process owns.

One process at a time holds an arm, through one connection: a worker's environments of training and evaluation take
turns on it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.camera_set import CameraSet
from recipes.embodied.cameras.drivers import ArmScene, CameraError, CameraView
from recipes.embodied.config.camera_config import FrankaRobotOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts
from recipes.embodied.envs.franka.franka_tasks import move_toward
from recipes.embodied.envs.franka.pictures import drawn
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.real.driver import own_robot
from recipes.embodied.interventions.intervention import HandMotion
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import (
    ACTION_STEP,
    HOME,
    OWN_STATES,
    REACH_ACTIONS,
    REACH_INSTRUCTION,
    REACH_STATES,
    check_task,
    hand_pose,
    points_within,
    reach_potential,
    reach_target,
    reached,
    start_within,
    steered,
    write_arm_states,
)
from recipes.embodied.robots.robot_errors import RobotLateError
from recipes.embodied.robots.robot_session import check_arm, refuse_faults, watch_cameras
from recipes.embodied.robots.wire_protocol import ArmState
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.algorithms.options import checked_options
from rlinf_core.hardware.franka import Franka

TASKS = ("reach",)
SPEC = EnvSpec(REACH_STATES, REACH_ACTIONS, has_instructions=True)
# The wait for an arm, in seconds: when a run restarts, workers that are still ending may hold it.
LEASE_PATIENCE = 10.0
LATE_IN_A_ROW = 10
LEAD_SCALE = 0.3  # radians; scales leads to about 1
_SAME = 1e-4  # the rounding error of an executed action
_log = logging.getLogger("rlinf.robots")


class _SharedArm:
    """The connection of this process to one arm and its cameras, and the environment that moved it last."""

    def __init__(self, arm: Franka, options: FrankaRobotOptions) -> None:
        self.arm, self.options, self.client = arm, options, FrankaClient(arm)
        self.cameras: CameraSet | None = None
        try:
            self.scene = ArmScene(self.client.state().joints, None, time.monotonic())
            if options.cameras:
                self.cameras = CameraSet(options, arm, self.client.where, lambda: self.scene)
            if not arm.disable_validate:
                opened = [serial for serial in options.serials(arm.camera_serials).values() if serial]
                checks = check_arm(self.client, arm, opened)
                # The present holder may be ending, so the lease is left to `acquire`, which waits.
                refuse_faults(self.client, [check for check in checks if check.name != "lease"])
            self.client.acquire(LEASE_PATIENCE)
        except BaseException:
            self.close()
            raise
        self.users: set[int] = set()
        self.mover: object = None

    def close(self) -> None:
        """Release the arm, then the cameras."""
        try:
            self.client.close()
        finally:
            if self.cameras is not None:
                self.cameras.close()


_arms: dict[tuple[str, int], _SharedArm] = {}


class FrankaRobotEnv(VectorEnv):
    """Task `reach`, with the actions, states and rewards of `franka_kin`, in real time, and images of `cameras`.

    `hardware` in its settings is the one arm that the process owns, so `num_envs` is 1, with one env worker per arm. A
    start moves the arm into place within its `workspace`, which also contains the points to reach. The arm's controller
    must be running, and the checks must pass.

    An action moves the target of the arm, which may lag behind it. The executed action is the change of the target that
    the controller accepted, regardless of lag.

    An action that arrives too late is reported instead of executed; `LATE_IN_A_ROW` consecutive ones end the run.
    """

    options_model = FrankaRobotOptions
    alters_actions = True
    paces_itself = True

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        check_task("franka_robot", settings.task or "reach", TASKS, {})
        options = cast("FrankaRobotOptions", checked_options(type(self), settings.options, "env.train.options"))
        arm = own_robot(settings, Franka, env_type="franka_robot", hardware="Franka", noun="arm")
        points_within(arm.workspace)
        self._key = (arm.robot_ip, arm.robot_port)
        if self._key not in _arms or _arms[self._key].client.closed:
            _arms[self._key] = _SharedArm(arm, options)
        self._arm = _arms[self._key]
        if self._arm.options != options:
            raise ConfigError(
                "training and evaluation have different options of one arm",
                where=self._arm.client.where,
                help="write them in `env.train.options` alone",
            )
        size = REACH_STATES if options.point_in_states else OWN_STATES
        size += len(HOME) if options.lead_in_states else 0
        self._spec = replace(SPEC, state_size=size, cameras=options.shapes)
        self._arm.users.add(id(self))
        self._joints = HOME[:, None].copy()
        self._accepted = HOME.copy()
        self._target = np.zeros((3, 1))
        self._hand = np.zeros((3, 1))
        self._potential = np.zeros(1)
        self._late = 0
        self._state_ages = (0.0, 0)

    @property
    def spec(self) -> EnvSpec:
        """16 states, or 10 without the point, plus 7 with the lead; 7 actions; the cameras of the options."""
        return self._spec

    def close(self) -> None:
        """Release the arm, unless another environment of this process uses it."""
        self._arm.users.discard(id(self))
        if not self._arm.users and _arms.get(self._key) is self._arm:
            del _arms[self._key]
            self._arm.close()

    def _start(self, rows: IntArray, starts: Starts) -> None:
        draws = starts.uniform(10).T
        workspace = self._arm.arm.workspace
        self._target = reach_target(draws[7:], workspace)
        self._take(start_within(draws[:7], workspace)[:, 0])
        self._potential = reach_potential(self._target, self._hand)

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        if self._arm.mover is not self:
            self._take(self._joints[:, 0])
        begun = self._accepted
        deltas = np.clip(actions[0], -1, 1) * ACTION_STEP[:, 0]
        self._see(self._moved(deltas))
        # The part of the action that limits and lateness allowed.
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
        watch_cameras(client, self._arm.arm, state, self._arm.cameras)
        return state

    def _take(self, joints: NDArray[np.float64]) -> None:
        """Move the arm to the joint positions that this environment expects."""
        self._see(self._arm.client.reset(joints))
        self._arm.mover = self

    def _see(self, state: ArmState) -> None:
        self._accepted, self._joints = state.target, state.joints[:, None]
        self._hand = hand_pose(self._joints)[0]
        self._arm.scene = ArmScene(state.joints, self._target[:, 0], time.monotonic())

    def views(self, row: int) -> list[CameraView]:
        """See `VectorEnv`: camera images; without cameras, a drawing of the measured joints and the target."""
        if self._arm.cameras is not None:
            return self._arm.cameras.views()
        return [CameraView("joints", drawn(self._arm.scene), self._arm.scene.measured)]

    def frame_ages(self) -> dict[str, FloatArray]:
        return {} if self._arm.cameras is None else self._arm.cameras.frame_ages()

    def take_figures(self) -> dict[str, tuple[float, int]]:
        """See `VectorEnv`: the ages of states and frames when they were observed, in seconds."""
        ages = {} if self._arm.cameras is None else self._arm.cameras.take_ages()
        states, self._state_ages = self._state_ages, (0.0, 0)
        return {"state_age": states, **{f"frame_age/{camera}": age for camera, age in ages.items()}}

    def expert(self) -> FloatArray:
        """See `VectorEnv`: moves the arm's target straight to the point, and waits there until the arm has followed."""
        return move_toward(self._accepted[:, None], self._target).T.astype(np.float32)

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """See `VectorEnv`: the motion of the hand, by the arm's kinematics."""
        return steered(self._joints[:, 0], motion, grips=False)

    def _observe(self) -> Observation:
        states: FloatArray = np.empty((1, REACH_STATES), np.float32)
        write_arm_states(states.T, self._joints, self._hand, self._target)
        total, count = self._state_ages
        self._state_ages = (total + time.monotonic() - self._arm.scene.measured, count + 1)
        if not self._arm.options.point_in_states:
            states = states[:, :OWN_STATES]
        if self._arm.options.lead_in_states:
            lead = (self._accepted[:, None] - self._joints) / LEAD_SCALE
            states = np.concatenate((states, lead.T.astype(np.float32)), axis=1)
        return {"states": states, **self._pictures(), "instructions": np.full(1, REACH_INSTRUCTION)}

    def _pictures(self) -> Observation:
        """Return the newest frame of each camera.

        Raises:
            CameraError: a frame is too old; the arm was stopped.
        """
        if self._arm.cameras is None:
            return {}
        try:
            return {image_key(camera): image[None] for camera, image in self._arm.cameras.observe().items()}
        except CameraError as error:
            self._arm.client.stop()
            raise error.after_stop() from error
