"""The interface of custom robot drivers. Imports numpy but no vendor package.

A custom driver is a subclass of `RobotDriver`; a robot's `driver: package.module:Class` names it, and `env_type: robot`
makes an environment of it. `check_driver` tests the contract described here: it moves the robot slightly.
"""

from __future__ import annotations

import reprlib
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
from rlinf_core.hardware.robots import PluginDrivenRobot
from rlinf_core.registry import import_target

# Constants of the conformance test.
_STEPS = 5
_SMALL = 0.1  # share of the largest action
_WATCHED = 5  # control periods for which an idle robot is watched
_SETTLING = 12  # the most repetitions of that until a stopped robot must be at rest
_DRIFTS = 3  # a rejected action may change an observation by at most this multiple of the drift
_ROUNDING = 1e-5


class RobotDriver(ABC):
    """A connection to one robot, made when a run starts. Used by one thread.

    The robot itself must stop when commands cease: after `kill -9` or a power cut, no line of a driver runs.

    Args:
        robot: its entry in the job file, with the node's variables substituted.
        options: `options` of that entry; an instance of the class attribute `options_model`, if it exists.

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
            RobotError: the robot cannot reach the start.
        """

    @abstractmethod
    def move(self, action: FloatArray) -> FloatArray:
        """Execute an action, float32 [A], each number from -1 to 1, and wait for the end of its control period.

        Returns:
            The part of the action that the robot's limits allow, in the same form: the change of its target, not of its
            measured state. An arm that lags behind its target has executed the action.

        Raises:
            RobotStoppedError: the robot stands still until a reset.
            RobotError: any other fault.
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
        """Return the reward of the last action, and whether the task is solved; None if the robot measures neither."""
        return None

    def steer(self, motion: HandMotion) -> FloatArray | None:
        """Return the action, float32 [A], that moves the hand as a person commands; None: use `VectorEnv.steer`."""
        return None

    def gripper_is_closed(self) -> bool | None:
        """Return whether the last command closed the gripper; None: use `VectorEnv.gripper_is_closed`."""
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
        ConfigError: the class does not exist or is not a driver, or an option is wrong.
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
        kind: the class of the robot's entry.
        env_type: the environment type, as the file names the environment.
        hardware: a suitable hardware type, for the error.
        noun: what the robot is called, `arm` or `robot`.

    Raises:
        ConfigError: the process has no robot or several, or more than one environment for it.
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

    Stand beside the robot, with a hand on its emergency stop. A stopped robot is compared with itself at rest, since
    sensors are noisy and joints settle.

    Args:
        make: opens a new connection to the robot on each call.

    Raises:
        DriverContractError: the contract is violated; the message says how.
    """
    driver = make()
    try:
        _check_motion(driver)
        _check_stop(driver)
    finally:
        driver.close()
    driver.close()  # closing twice must do nothing
    again = make()  # works only if the connection was released
    again.close()


def _check_motion(driver: RobotDriver) -> None:
    driver.reset(0)
    _check_observation(driver)
    for step in range(_STEPS):
        asked = np.full(driver.spec.action_size, _SMALL * (-1) ** step, np.float32)
        if (np.abs(executed_action(driver, asked)) > 1).any():
            raise _not_executed()
        _check_observation(driver)
        score = measured_score(driver)
        if score is not None and not np.isfinite(score[0]):
            raise _broken("the reward of `score` is not finite", "return a number and whether the task is solved")


def executed_action(driver: RobotDriver, asked: FloatArray) -> FloatArray:
    """Execute an action, and return its executed part, float32 [A].

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


def measured_score(driver: RobotDriver) -> tuple[float, bool] | None:
    """Return the score of the last action; see `RobotDriver.score`.

    Raises:
        DriverContractError: the driver returns something else.
        RobotError: as `RobotDriver.score`.
    """
    score = cast("Any", driver.score())
    if score is None:
        return None
    is_pair = isinstance(cast("object", score), tuple) and len(score) == 2
    reward, solved = score if is_pair else (None, None)
    number: Array = np.asarray(reward)
    if number.shape or number.dtype.kind not in "fiu" or not isinstance(cast("object", solved), bool | np.bool_):
        raise _broken(
            f"`score` returns {reprlib.repr(score)}",
            "return a number and whether the task is solved, true or false; or None",
        )
    return float(number), bool(solved)


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
    """Return observations of a stopped, idle robot once it no longer slows down.

    A robot brakes and oscillates for some time after a stop, and its sensors are noisy.
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
    """Return the range of each floating-point number over some observations."""
    names = [name for name, value in observed[0].items() if value.dtype.kind == "f"]
    return {name: np.ptp(np.stack([one[name] for one in observed]), axis=0) for name in names}


def _broken(message: str, help: str) -> DriverContractError:
    return DriverContractError(message, help=help)
