"""The environment of a robot with a custom `driver`: one environment on the robot that the process owns."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.camera_set import CameraSet
from recipes.embodied.cameras.drivers import CameraError, CameraView
from recipes.embodied.config.camera_config import RobotEnvOptions
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, image_key
from recipes.embodied.envs.real.driver import (
    DriverContractError,
    executed_action,
    measured_score,
    open_driver,
    own_robot,
)
from recipes.embodied.interventions.intervention import HandMotion, LeaderAction
from recipes.embodied.robots.robot_errors import RobotCheckError, RobotError
from recipes.embodied.robots.robot_session import RobotClaim
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.algorithms.options import checked_options
from rlinf_core.hardware.robots import PluginDrivenRobot


class _OpenRobot:
    """The connection of this process to one robot and its cameras, shared by its environments."""

    def __init__(self, robot: PluginDrivenRobot, options: RobotEnvOptions) -> None:
        self.place, self.options = robot.place, options
        self.where = f"{robot.place} of node {robot.node_rank}"
        self.cameras: CameraSet | None = None
        self._claim = RobotClaim(robot.place)
        try:
            self.driver = open_driver(robot)
        except BaseException:
            self._claim.release()
            raise
        try:
            if self.driver.spec.num_choices is not None:
                raise DriverContractError(
                    "the driver's `spec` has `num_choices`, but `move` takes numbers from -1 to 1",
                    where=self.where,
                    help="leave it out, and convert the numbers in `move`",
                )
            if options.cameras:
                self.cameras = CameraSet(options, robot, self.where)
            faults = [] if robot.disable_validate else self.driver.faults()
            if faults:
                raise RobotCheckError(
                    f"the robot is not ready to move: {'; '.join(faults)}",
                    where=self.where,
                    help="fix that, then start again; `disable_validate: true` skips the checks",
                )
        except BaseException:
            self.close()
            raise
        self.users: set[int] = set()
        self.mover: object = None

    def close(self) -> None:
        try:
            self.driver.close()
        finally:
            self._claim.release()
            if self.cameras is not None:
                self.cameras.close()


_open: dict[str, _OpenRobot] = {}


class DrivenRobotEnv(VectorEnv):
    """The environment of a robot with a custom driver. `task` is free text; rewards come from the driver, a person or a
    classifier, images from the driver and the `cameras` of the options.

    `hardware` in its settings is the one robot that the process owns, so `num_envs` is 1. The environments of training
    and evaluation take turns on it; each begins with a reset.
    """

    options_model = RobotEnvOptions
    alters_actions = True
    paces_itself = True

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        options = cast("RobotEnvOptions", checked_options(type(self), settings.options, "env.train.options"))
        robot = own_robot(settings, PluginDrivenRobot, env_type="robot", hardware="Robot", noun="robot")
        if robot.place not in _open:
            _open[robot.place] = _OpenRobot(robot, options)
        self._robot = _open[robot.place]
        twice = [name for name in options.cameras if name in self._robot.driver.spec.cameras]
        if self._robot.options != options or twice:
            self.close()  # releases the robot unless another environment uses it
            what = f"two cameras are called `{twice[0]}`: one is the driver's" if twice else None
            raise ConfigError(
                what or "training and evaluation have different cameras on one robot",
                where=self._robot.where,
                help="rename it" if twice else "write `cameras` in `env.train.options` alone",
            )
        self._robot.users.add(id(self))
        self.control_hz = self._robot.driver.control_hz
        self._seed = 0
        self._scores = False

    @property
    def spec(self) -> EnvSpec:
        """See `VectorEnv`: the driver's spec plus our cameras, and instructions if there is a `task`."""
        spec = self._robot.driver.spec
        cameras = {**spec.cameras, **self._robot.options.shapes}
        return replace(spec, cameras=cameras, has_instructions=self.settings.task is not None)

    @property
    def knows_success(self) -> bool:
        """Whether episodes are judged: by the driver, a person, or a classifier."""
        return self._scores or self.intervention is not None or self.judge is not None

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """See `VectorEnv`: the driver's method, if it returns an action."""
        action = self._robot.driver.steer(motion)
        return super().steer(motion, row) if action is None else action

    def gripper_is_closed(self, row: int) -> bool:
        """See `VectorEnv`: the driver's method, if it knows."""
        closed = self._robot.driver.gripper_is_closed()
        return super().gripper_is_closed(row) if closed is None else closed

    def follow(self, joints: NDArray[np.float64], row: int) -> LeaderAction | None:
        """See `VectorEnv`: the driver's method."""
        return self._robot.driver.follow(joints)

    def close(self) -> None:
        """Stop the robot and release it, unless another environment of this process uses it."""
        self._robot.users.discard(id(self))
        if not self._robot.users and _open.get(self._robot.place) is self._robot:
            del _open[self._robot.place]
            self._robot.close()

    def _start(self, rows: IntArray, starts: Starts) -> None:
        self._seed = starts.seeds()[0]
        self._take()

    def _take(self) -> None:
        with self._stopped_by_errors():
            self._robot.driver.reset(self._seed)
        self._robot.mover = self

    @contextmanager
    def _stopped_by_errors(self) -> Generator[None, None, None]:
        """Stop the robot if the driver or a camera fails within the block."""
        try:
            yield
        except BaseException as error:
            try:
                self._robot.driver.stop()
            except Exception as failure:  # noqa: BLE001 - whatever a driver raises
                raise RobotError(
                    "the robot failed, and could not be stopped",
                    where=self._robot.where,
                    why=f"{type(error).__name__}: {error}; then {type(failure).__name__}: {failure}",
                    help="stop it by hand, by its emergency stop",
                ) from error
            if isinstance(error, CameraError):
                raise error.after_stop() from error
            raise

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        if self._robot.mover is not self:
            self._take()
        driver = self._robot.driver
        with self._stopped_by_errors():
            done = executed_action(driver, np.clip(actions[0], -1, 1).astype(np.float32))
            score = measured_score(driver)
            if self._robot.cameras is not None:
                self._robot.cameras.watch()
        self._scores = self._scores or score is not None
        reward, solved = score or (0.0, False)
        solved_now = np.array([solved])
        return Transition(np.array([reward], np.float32), solved_now, None, solved_now, done[None])

    def views(self, row: int) -> list[CameraView]:
        """See `VectorEnv`: the images of the driver and the cameras."""
        driver, cameras = self._robot.driver, self._robot.cameras
        observed: Mapping[str, Array] = driver.observe() if driver.spec.cameras else {}
        now = time.monotonic()
        views = [CameraView(name, np.asarray(observed[image_key(name)]), now) for name in driver.spec.cameras]
        return views if cameras is None else [*views, *cameras.views()]

    def frame_ages(self) -> dict[str, FloatArray]:
        return {} if self._robot.cameras is None else self._robot.cameras.frame_ages()

    def take_figures(self) -> dict[str, tuple[float, int]]:
        """See `VectorEnv`: the ages of frames when they were observed, in seconds."""
        ages = {} if self._robot.cameras is None else self._robot.cameras.take_ages()
        return {f"frame_age/{camera}": age for camera, age in ages.items()}

    def _observe(self) -> Observation:
        driver, cameras = self._robot.driver, self._robot.cameras
        with self._stopped_by_errors():
            observation = {name: np.array(value)[None] for name, value in driver.observe().items()}
            pictures = {} if cameras is None else cameras.observe()
        observation |= {image_key(camera): image[None] for camera, image in pictures.items()}
        if self.settings.task is not None:
            observation[INSTRUCTIONS] = np.full(1, self.settings.task)
        return observation
