"""Conformance test of a robot driver: it moves the robot slightly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from recipes.embodied.envs.real.driver import RobotDriver
from recipes.embodied.robots.robot_errors import RobotStoppedError
from rlinf_core import RLinfError

_STEPS = 5
_SMALL = 0.1  # share of the largest action


class DriverContractError(RLinfError):
    """A driver violates the contract of `RobotDriver`."""


def check_driver(make: Callable[[], RobotDriver]) -> None:
    """Reset a robot, move it slightly, stop it, and check the contract of `RobotDriver`.

    Stand beside the robot, with a hand at its emergency stop.

    Args:
        make: connects with the robot anew each time.

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
        done = driver.move(asked)
        if np.shape(done) != asked.shape or not np.isfinite(done).all() or (np.abs(done) > 1).any():
            raise _broken("`move` does not return the executed action", "return A numbers, each from -1 to 1")
        _check_observation(driver)
        score = driver.score()
        if score is not None and not np.isfinite(score[0]):
            raise _broken("the reward of `score` is not finite", "return a number and whether the task is solved")


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
    before = driver.observe()
    try:
        driver.move(np.full(driver.spec.action_size, _SMALL, np.float32))
    except RobotStoppedError:
        pass
    else:
        raise _broken(
            "the robot moves after `stop`",
            "reject actions with a RobotStoppedError until `reset`, ideally in the robot",
        )
    after = driver.observe()
    if any(value.dtype.kind == "f" and not np.allclose(value, after[name]) for name, value in before.items()):
        raise _broken("an action after `stop` changes the observed state", "execute nothing until `reset`")
    driver.reset(1)
    driver.move(np.zeros(driver.spec.action_size, np.float32))


def _broken(message: str, help: str) -> DriverContractError:
    return DriverContractError(message, help=help)
