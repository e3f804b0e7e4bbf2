"""The environment of a robot with a user-written `driver`: one environment on the robot that the process owns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.observation_keys import INSTRUCTIONS
from recipes.embodied.envs.real.assigned_robot import own_robot
from recipes.embodied.envs.real.driver import open_driver
from recipes.embodied.envs.starts import Starts
from recipes.embodied.interventions.intervention import HandMotion
from recipes.embodied.robots.claim import RobotClaim
from recipes.embodied.robots.robot_errors import RobotCheckError
from rlinf_core.hardware.robots.plugin_driven import PluginDrivenRobot


class _OpenRobot:
    """The connection of this process to one robot, shared by its environments."""

    def __init__(self, robot: PluginDrivenRobot) -> None:
        self.place = robot.place
        self._claim = RobotClaim(robot.place)
        try:
            self.driver = open_driver(robot)
        except BaseException:
            self._claim.release()
            raise
        self.users: set[int] = set()
        self.mover: object = None
        faults = [] if robot.disable_validate else self.driver.faults()
        if faults:
            self.close()
            raise RobotCheckError(
                f"the robot is not ready to move: {'; '.join(faults)}",
                where=f"{robot.place} of node {robot.node_rank}",
                help="fix that, then start again; `disable_validate: true` skips the checks",
            )

    def close(self) -> None:
        try:
            self.driver.close()
        finally:
            self._claim.release()


_open: dict[str, _OpenRobot] = {}


class DrivenRobotEnv(VectorEnv):
    """The task is the text `task`; rewards come from the driver, a person or a classifier.

    Its settings' `hardware` is the one robot that the process owns, so `num_envs` is 1. The environments of training
    and evaluation take turns on it; each begins with a reset.
    """

    alters_actions = True
    paces_itself = True

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        robot = own_robot(settings, PluginDrivenRobot, env_type="robot", hardware="Robot", noun="robot")
        if robot.place not in _open:
            _open[robot.place] = _OpenRobot(robot)
        self._robot = _open[robot.place]
        self._robot.users.add(id(self))
        self._seed = 0
        self._scores = False

    @property
    def spec(self) -> EnvSpec:
        """See `VectorEnv`: as the driver says; with a `task` the policy is told it."""
        spec = self._robot.driver.spec
        return EnvSpec(
            spec.state_size,
            spec.action_size,
            cameras=spec.cameras,
            has_instructions=self.settings.task is not None,
        )

    @property
    def knows_success(self) -> bool:
        """Whether episodes are judged: by the driver, a person, or a classifier."""
        return self._scores or self.intervention is not None or self.judge is not None

    @property
    def control_hz(self) -> float | None:
        """See `VectorEnv`."""
        return self._robot.driver.control_hz

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """See `VectorEnv`: as the driver has it, where it does."""
        action = self._robot.driver.steer(motion)
        return super().steer(motion, row) if action is None else action

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
        self._robot.driver.reset(self._seed)
        self._robot.mover = self

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        if self._robot.mover is not self:
            self._take()
        driver = self._robot.driver
        try:
            done = driver.move(np.clip(actions[0], -1, 1).astype(np.float32))
            score = driver.score()
        except BaseException:
            driver.stop()
            raise
        self._scores = self._scores or score is not None
        reward, solved = score or (0.0, False)
        solved_now = np.array([solved])
        executed = np.asarray(done, np.float32)[None]
        return Transition(np.array([reward], np.float32), solved_now, None, solved_now, executed)

    def _observe(self) -> Observation:
        observation = {name: np.array(value)[None] for name, value in self._robot.driver.observe().items()}
        if self.settings.task is not None:
            observation[INSTRUCTIONS] = np.full(1, self.settings.task)
        return observation
