"""Conformance test of a robot driver: it moves the robot slightly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from recipes.embodied.envs.real.driver import RobotDriver
from recipes.embodied.robots.robot_errors import RobotStoppedError
from recipes.training.arrays import Array
from rlinf_core import RLinfError

_STEPS = 5
_SMALL = 0.1  # share of the largest action
_WATCHED = 5  # control periods in which a robot is watched that no action is sent to
_SETTLING = 12  # times that, within which a stopped robot must have come to rest
_DRIFTS = 3  # times that drift which an observation may change after an action that was refused
_ROUNDING = 1e-5


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
