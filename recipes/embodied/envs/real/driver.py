"""The interface of user-written robot drivers. numpy only, no vendor package.

A driver of your own is a subclass of `RobotDriver`; `driver: package.module:Class` of a robot names it, and `env_type:
robot` makes an environment of it. `check_driver` tests what is promised here: it moves the robot slightly.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.env_types import driver_of
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray
from recipes.embodied.interventions.intervention import HandMotion, LeaderAction
from recipes.embodied.robots.robot_errors import RobotError, RobotStoppedError
from recipes.training.arrays import Array
from rlinf_core import ConfigError, RLinfError
from rlinf_core.algorithms.options import checked_options
from rlinf_core.hardware.robots.plugin_driven import PluginDrivenRobot
from rlinf_core.registry import import_target

# Of the conformance test.
_STEPS = 5
_SMALL = 0.1  # share of the largest action
_WATCHED = 5  # control periods in which a robot is watched that no action is sent to
_SETTLING = 12  # times that, within which a stopped robot must have come to rest
_DRIFTS = 3  # times that drift which an observation may change after an action that was refused
_ROUNDING = 1e-5


class RobotDriver(ABC):
    """A connection to one robot, made when a run starts. Used by one thread.

    The robot itself must stop when nothing comes any more: no line of a driver runs after `kill -9` or a power cut.

    Args:
        robot: its entry in the file, with the values of the node's variables in their places.
        options: `options` of that entry; where the class has an attribute `options_model`, its instance.

    Attributes:
        control_hz: actions per second.

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
        """Stop the robot immediately. It stays still until a reset."""

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


class DriverContractError(RLinfError):
    """A driver violates the contract of `RobotDriver`."""


def check_driver(make: Callable[[], RobotDriver]) -> None:
    """Reset a robot, move it slightly, stop it, and check the contract of `RobotDriver`.

    Stand beside the robot, with a hand at its emergency stop. After a stop the robot is compared with itself when no
    action is sent: sensors have noise, and joints settle.

    Args:
        make: opens a new connection to the robot on each call.

    Raises:
        DriverContractError: a promise is broken; the message says which.
    """
    driver = make()
    try:
        _check_motion(driver)
        _check_stop(driver)
    finally:
        driver.close()
    driver.close()  # once more: it must do nothing
    again = make()  # the connection was given back
    again.close()


def _check_motion(driver: RobotDriver) -> None:
    driver.reset(0)
    _check_observation(driver)
    for step in range(_STEPS):
        asked = np.full(driver.spec.action_size, _SMALL * (-1) ** step, np.float32)
        if (np.abs(executed_action(driver, asked)) > 1).any():
            raise _not_executed()
        _check_observation(driver)
        score = driver.score()
        if score is not None and not np.isfinite(score[0]):
            raise _broken("the reward of `score` is not finite", "return a number and whether the task is solved")


def executed_action(driver: RobotDriver, asked: FloatArray) -> FloatArray:
    """Return what a robot has executed of an action, float32 [A].

    Raises:
        DriverContractError: the driver returns something else.
        RobotError: as `RobotDriver.move`.
    """
    done = driver.move(asked)
    try:
        executed = np.asarray(done, np.float32)
    except (TypeError, ValueError):
        raise _not_executed() from None
    if executed.shape != asked.shape or not np.isfinite(executed).all():
        raise _not_executed()
    return executed


def _not_executed() -> DriverContractError:
    return _broken("`move` does not return the executed action", "return A numbers, each from -1 to 1")


def _check_observation(driver: RobotDriver) -> None:
    observed = driver.observe()
    wanted = {name: observation for name, observation in driver.spec.observations.items() if observation[1] != "U"}
    if set(observed) != set(wanted):
        raise _broken(
            f"`observe` returns {sorted(observed)}; `spec` says {sorted(wanted)}", "make `spec` and `observe` agree"
        )
    for name, (shape, kind) in wanted.items():
        array = observed[name]
        if array.shape != shape or array.dtype != kind:
            said = f"{array.dtype}{list(array.shape)}; `spec` says {kind}{list(shape)}"
            raise _broken(f"`{name}` is {said}", "make `spec` and `observe` agree")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise _broken(f"`{name}` is not finite", "check the units, and values that are not available yet")


def _check_stop(driver: RobotDriver) -> None:
    driver.stop()
    still = _settled(driver)
    try:
        driver.move(np.full(driver.spec.action_size, _SMALL, np.float32))
    except RobotStoppedError:
        pass
    else:
        raise _broken(
            "the robot moves after `stop`",
            "reject actions with a RobotStoppedError until `reset`, ideally in the robot",
        )
    after = _watched(driver, still[-1])
    for name, spread in _spreads(after).items():
        allowed = _DRIFTS * _spreads(still)[name] + _ROUNDING * (1 + np.abs(after[0][name]))
        if (spread > allowed).any():
            raise _broken(
                f"an action after `stop` changes `{name}` more than the robot drifts without one",
                "execute nothing until `reset`",
            )
    driver.reset(1)
    driver.move(np.zeros(driver.spec.action_size, np.float32))


def _settled(driver: RobotDriver) -> list[Mapping[str, Array]]:
    """Return observations of a stopped robot that no action is sent to, once it does not slow down any further.

    A robot with mass brakes and oscillates for some time after a stop, and its sensors have noise.
    """
    before = _watched(driver)
    for _ in range(_SETTLING):
        still = _watched(driver, before[-1])
        spreads = _spreads(before)
        if all((2 * spread >= spreads[name] - _ROUNDING).all() for name, spread in _spreads(still).items()):
            return still
        before = still
    raise _broken(
        f"the robot still moves {_SETTLING * _WATCHED / driver.control_hz:.1f} s after `stop`", "stop it at once"
    )


def _watched(driver: RobotDriver, *earlier: Mapping[str, Array]) -> list[Mapping[str, Array]]:
    """Return the observation of each of some control periods, after earlier ones."""
    observed = list(earlier)
    for _ in range(_WATCHED):
        time.sleep(1 / driver.control_hz)
        observed.append({name: np.array(value) for name, value in driver.observe().items()})
    return observed


def _spreads(observed: list[Mapping[str, Array]]) -> dict[str, Array]:
    """Return by how much each floating-point number changed within some observations."""
    names = [name for name, value in observed[0].items() if value.dtype.kind == "f"]
    return {name: np.ptp(np.stack([one[name] for one in observed]), axis=0) for name in names}


def _broken(message: str, help: str) -> DriverContractError:
    return DriverContractError(message, help=help)
