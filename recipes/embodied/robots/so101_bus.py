"""The motors of an SO-101 arm, a follower or a leader, by lerobot's bus of Feetech motors."""

# lerobot is an optional package in separate interpreters.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.intervention_types import LeaderOptions, PersonOptions
from recipes.embodied.interventions.intervention import HandMotion, InterventionError, LeaderAction, Steerable
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.robots.robot_errors import RobotError, RobotLinkLostError, RobotUnreachableError
from rlinf_core import ConfigError
from rlinf_core.process.requirements import missing_modules

JOINTS: Final = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
_MODEL: Final = "sts3215"
_STEPS: Final = 4095  # per turn, in the motors' units
_RETRIES: Final = 2
T = TypeVar("T")


class SO101Bus:
    """The connected motors of one arm. Positions are degrees from the middle of a range; the gripper's are percent.

    Args:
        device: the serial port.
        calibration: a file of `lerobot-calibrate`; None: the calibration in the motors.
        where: the arm and its port, for errors.

    Attributes:
        low: [6], the lowest position of each joint.
        high: [6], the highest position of each joint.

    Raises:
        ConfigError: lerobot is not installed, or the file is no calibration of this arm.
        RobotUnreachableError: the port cannot be opened, or other motors answer.
    """

    def __init__(self, device: str, calibration: str | None, where: str) -> None:
        self._where = where
        self._bus = self._asked(lambda: _open_bus(device, calibration), RobotUnreachableError)
        ranges = [self._bus.calibration[joint] for joint in JOINTS]
        halves = [(one.range_max - one.range_min) / 2 * 360 / _STEPS for one in ranges]
        self.low = np.array([*(-half for half in halves[:-1]), 0.0])
        self.high = np.array([*halves[:-1], 100.0])

    @property
    def is_calibrated(self) -> bool:
        """Whether the motors hold the calibration in use."""
        return self._asked(lambda: bool(self._bus.is_calibrated))

    def read(self) -> NDArray[np.float64]:
        """Return the measured positions [6].

        Raises:
            RobotLinkLostError: the motors do not answer.
        """
        read = self._asked(lambda: self._bus.sync_read("Present_Position", num_retry=_RETRIES))
        return np.array([float(read[joint]) for joint in JOINTS])

    def write(self, target: NDArray[np.float64]) -> None:
        """Give the motors their targets [6].

        Raises:
            RobotLinkLostError: the motors do not answer.
        """
        goals = dict(zip(JOINTS, target.tolist(), strict=True))
        self._asked(lambda: self._bus.sync_write("Goal_Position", goals))

    def hold(self, holds: bool) -> None:
        """Have the motors hold their targets, or release them to be moved by hand.

        Raises:
            RobotLinkLostError: the motors do not answer.
        """
        self._asked(self._bus.enable_torque if holds else self._bus.disable_torque)

    def close(self) -> None:
        """Close the port; the motors continue as they are.

        Raises:
            RobotLinkLostError: the motors do not answer.
        """
        self._asked(lambda: self._bus.disconnect(disable_torque=False))

    def _asked(self, call: Callable[[], T], kind: type[RobotError] = RobotLinkLostError) -> T:
        """Return the result of a bus call; raise a `kind` if the bus does not answer."""
        try:
            return call()
        except (OSError, RuntimeError) as error:
            raise kind(
                "the arm's motors do not answer",
                where=self._where,
                why=f"{type(error).__name__}: {error}",
                help="check power, cable and `device`, and that nothing else uses the port",
            ) from error


def _open_bus(device: str, calibration: str | None) -> Any:
    """Return the connected bus of an arm, with the calibration of a file, or else of its motors.

    Raises:
        ConfigError: lerobot is not installed, or the file is no calibration of this arm.
        OSError: the port cannot be opened, or a motor does not answer.
        RuntimeError: other motors answer.
    """
    if missing_modules(["lerobot"]):
        raise ConfigError(
            f"an SO-101 needs the package `lerobot`, which `{sys.executable}` does not have",
            help="give the node an interpreter of Python 3.12 with `lerobot[feetech]>=0.6,<0.7`",
        )
    from lerobot.motors import Motor, MotorCalibration, MotorNormMode
    from lerobot.motors.feetech import FeetechMotorsBus

    units = [MotorNormMode.DEGREES] * 5 + [MotorNormMode.RANGE_0_100]
    named = zip(JOINTS, units, strict=True)
    motors = {joint: Motor(number, _MODEL, unit) for number, (joint, unit) in enumerate(named, start=1)}
    written: dict[str, Any] | None = None
    if calibration is not None:
        try:
            values = json.loads(Path(calibration).expanduser().read_text(encoding="utf-8"))
            written = {joint: MotorCalibration(**values[joint]) for joint in JOINTS}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"`{calibration}` is no calibration of an SO-101",
                why=f"{type(error).__name__}: {error}",
                help="name the file that `lerobot-calibrate` wrote, or leave it out: the motors hold it, too",
            ) from error
    bus = FeetechMotorsBus(port=device, motors=motors, calibration=written)
    bus.connect()
    if written is None:
        bus.calibration = bus.read_calibration()
    return bus


_WARNING_STEPS: Final = 40  # steps between two warnings about arms that are too far apart
_log = logging.getLogger("rlinf.robots")


class LeaderSource(PersonSource):
    """Takes over when the leader is moved close to the arm's pose. The arm then follows at its own speed each joint
    that the person has moved, so that an unmoved gripper keeps its grip.
    """

    options_model = LeaderOptions
    judges = False

    def __init__(self, env: Steerable, options: LeaderOptions) -> None:
        super().__init__(env, options)
        self._where = f"leader arm at {options.device}"
        if env.follow(np.zeros(len(JOINTS)), 0) is None:
            raise ConfigError(
                "`source: leader` moves an SO-101, which this robot is not",
                help="use another source, or give your driver a method `follow`",
            )
        try:
            self._bus = SO101Bus(options.device, options.calibration, self._where)
            self._bus.hold(False)
            self._joints = self._seen = self._begun = self._bus.read()
        except RobotError as error:
            raise self._lost(error) from error
        self._unwarned_steps = 0
        self._moved = np.zeros(len(JOINTS), np.bool_)  # joints moved by the person in this takeover

    def poll(self) -> Controls:
        """See `PersonSource`: engaged while the leader moves, and until the arm has reached its pose."""
        try:
            self._joints = self._bus.read()
        except RobotError as error:
            raise self._lost(error) from error
        if not self._engagement.active:
            self._begun, self._moved = self._seen, np.zeros(len(JOINTS), np.bool_)
        self._moved |= np.abs(self._joints - self._begun) > self.options.deadband
        moved = bool((np.abs(self._joints - self._seen) > self.options.deadband).any())
        if moved:
            self._seen = self._joints
        if self._engagement.active:
            behind = any(abs(way) > self.options.deadband for way in self._follow().away.values())
            return Controls(engaged=moved or behind)
        far = {joint: way for joint, way in self._away().items() if abs(way) > self.options.align}
        if moved and far:
            self._warn(far)
        return Controls(engaged=moved and not far)

    def close(self) -> None:
        try:
            self._bus.close()
        except RobotError as error:
            _log.warning("%s", error)

    def _engagement_options(self) -> PersonOptions:
        return PersonOptions(release_steps=self.options.release_steps)

    def _action(self, motion: HandMotion) -> NDArray[np.float32]:
        return self._follow().action

    def _follow(self) -> LeaderAction:
        away = self._away()
        held = self._joints - np.array([away.get(joint, 0.0) for joint in JOINTS])
        following = self.env.follow(np.where(self._moved, self._joints, held), 0)
        assert following is not None  # the source was opened with a leader
        return following

    def _away(self) -> dict[str, float]:
        """Return the distance of each joint from the arm's target to the leader."""
        following = self.env.follow(self._joints, 0)
        return {} if following is None else following.away

    def _warn(self, far: dict[str, float]) -> None:
        if self._unwarned_steps == 0:
            ways = ", ".join(f"{joint} by {-way:+.0f}" for joint, way in far.items())
            _log.warning("%s is too far from the arm's pose to take over; turn it: %s", self._where, ways)
        self._unwarned_steps = (self._unwarned_steps + 1) % _WARNING_STEPS

    def _lost(self, error: RobotError) -> InterventionError:
        return InterventionError(error.message, where=self._where, why=error.why, help=error.help)
