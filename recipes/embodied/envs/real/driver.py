"""The interface of user-written robot drivers. numpy only, no vendor package.

A driver of your own is a subclass of `RobotDriver`; `driver: package.module:Class` of a robot names it, and `env_type:
robot` makes an environment of it. `check_driver` of `robot_driver_contract.py` tests what is promised here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_types import driver_of
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray
from recipes.embodied.interventions.intervention import HandMotion, LeaderAction
from recipes.embodied.robots.robot_errors import RobotError
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.algorithms.options import checked_options
from rlinf_core.hardware.robots.plugin_driven import PluginDrivenRobot
from rlinf_core.registry import import_target


class RobotDriver(ABC):
    """A connection to one robot, made when a run starts. Used by one thread.

    The robot itself must stop when nothing comes any more: no line of a driver runs after `kill -9` or a power cut.

    Args:
        robot: its entry in the file, with the values of the node's variables in their places.
        options: `options` of that entry; where the class has an attribute `options_model`, its instance.

    Attributes:
        control_hz: actions in a second.

    Raises:
        RobotUnreachableError: the robot does not answer.
    """

    control_hz: float = 20.0

    def __init__(self, robot: PluginDrivenRobot, options: Any) -> None:
        self.robot, self.options = robot, options

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """The sizes of observations and actions; read once."""

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Move the robot to a start that depends only on `seed`, and wait until it arrives. Clears a stop.

        Raises:
            RobotError: it cannot.
        """

    @abstractmethod
    def move(self, action: FloatArray) -> FloatArray:
        """Execute an action, float32 [A], each number from -1 to 1, and wait until its control period is over.

        Returns:
            What the robot's limits have left of it, likewise: the change of its target, not that of what is measured.
            An arm that lags behind its target has executed the action.

        Raises:
            RobotStoppedError: the robot stands still until a reset.
            RobotError: anything else.
        """

    @abstractmethod
    def observe(self) -> Mapping[str, Array]:
        """Return the current observation as in `spec`: `states` [S], `images.CAMERA` [H, W, 3].

        Raises:
            RobotError: the robot or a camera does not answer.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the robot immediately. It stands still until a reset."""

    def score(self) -> tuple[float, bool] | None:
        """Return the reward of the last action, and whether the task is solved; None: the robot cannot measure them."""
        return None

    def steer(self, motion: HandMotion) -> FloatArray | None:
        """Return the action, float32 [A], that moves the hand as commanded by a person; None: use `VectorEnv.steer`."""
        return None

    def gripper_is_closed(self) -> bool | None:
        """Return whether the gripper was last told to close; None: use `VectorEnv.gripper_is_closed`."""
        return None

    def follow(self, joints: NDArray[np.float64]) -> LeaderAction | None:
        """Return the action that brings the targets to the `joints` of a leader arm; None: this robot has no leader."""
        return None

    def faults(self) -> list[str]:
        """Return the faults of the robot before any motion, each in a few words."""
        return []

    def close(self) -> None:
        """Stop the robot and close the connection. Idempotent."""
        self.stop()


def open_driver(robot: PluginDrivenRobot) -> RobotDriver:
    """Return the connected driver of a robot's entry.

    Raises:
        ConfigError: there is no such class, or it is not a driver, or an option is wrong.
        RobotError: the robot does not answer.
    """
    named = driver_of(robot)
    if named is None:
        raise ConfigError(
            f"the robot at {robot.place} has no `driver`",
            help="name your subclass of `RobotDriver`: `driver: package.module:Class`",
        )
    made = cast("type[RobotDriver]", import_target(named, "driver", [f"{__name__}:RobotDriver"]))
    try:
        return made(robot, checked_options(made, robot.options, "hardware.configs.options"))
    except RobotError as error:
        error.where = error.where or f"{named} at {robot.place} of node {robot.node_rank}"
        raise


RobotT = TypeVar("RobotT")


def own_robot(settings: EnvSettings, kind: type[RobotT], *, env_type: str, hardware: str, noun: str) -> RobotT:
    """Return the one robot of this process.

    Args:
        settings: the settings of the environment.
        kind: the class of its hardware.
        env_type: the environment type, as the file names the environment.
        hardware: a type of hardware that serves, for the error.
        noun: what the robot is called, `arm` or `robot`.

    Raises:
        ConfigError: there is none or several, or it has several environments to serve.
    """
    robots = [unit for unit in settings.hardware if isinstance(unit, kind)]
    if len(robots) != 1:
        raise ConfigError(
            f"`env_type: {env_type}` moves one {noun}, but this process owns {len(robots) or 'none'}",
            help=f"place `env` on a node group with `hardware: {{type: {hardware}}}`, one process for each {noun}",
        )
    if settings.num_envs != 1:
        raise ConfigError(
            f"`env_type: {env_type}` has one environment on each {noun}, not {settings.num_envs}",
            help=f"set `total_num_envs` to the number of {noun}s, and `pipeline_stage_num` to 1",
        )
    return robots[0]
