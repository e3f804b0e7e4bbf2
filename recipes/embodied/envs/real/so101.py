"""SO-101 arms on a serial port, a follower and a leader, by lerobot's bus of Feetech motors.

Actions move the targets of five joints and of the gripper. The motors hold their targets by themselves: without further
commands the arm moves to its last target, at most `lead` degrees away, and rests there.
"""

# lerobot is an optional package in separate interpreters.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from recipes.embodied.config.intervention_types import LeaderOptions, PersonOptions
from recipes.embodied.envs.env_spec import EnvSpec, FloatArray
from recipes.embodied.envs.real.driver import RobotDriver
from recipes.embodied.interventions.intervention import HandMotion, InterventionError, LeaderAction, Steerable
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.robots.robot_errors import (
    RobotError,
    RobotLinkLostError,
    RobotStoppedError,
    RobotUnreachableError,
)
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.hardware.robots import SO101
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


_ARRIVED: Final = 5.0  # degrees from the target, or percent of the gripper
_PATIENCE: Final = 3.0  # seconds in which the arm must arrive once its target is the start
Speed = Annotated[float, Field(gt=0, le=360)]


class SO101Options(BaseModel):
    """Options of the driver.

    Attributes:
        speed: fastest motion of a joint, in degrees a second; an action of 1 asks for it.
        gripper_speed: fastest motion of the gripper, in per cent of its opening a second.
        lead: degrees by which a target may be ahead of a joint that is held.
        start: the joints at the start of an episode, in degrees from the middle of their ranges, and the gripper in per
            cent.
        noise: degrees by which joints start elsewhere, at most.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    speed: Speed = 45.0
    gripper_speed: Speed = 100.0
    lead: Annotated[float, Field(gt=0, le=90)] = 15.0
    start: tuple[float, float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0, 50.0)
    noise: Annotated[float, Field(ge=0, le=20)] = 2.0


class SO101Driver(RobotDriver):
    """Five joints and a gripper: six actions, and twelve states, which are measured positions and targets.

    States are shares of the ranges of the calibration, from -1 to 1. The calibration is the one that lerobot wrote
    into the motors; a `calibration` file must be the same.
    """

    options_model = SO101Options
    control_hz = 20.0

    def __init__(self, robot: SO101, options: SO101Options) -> None:
        super().__init__(robot, options)
        self._where = f"SO-101 at {robot.device} of node {robot.node_rank}"
        self._bus = SO101Bus(robot.device, robot.calibration, self._where)
        self._low, self._high = self._bus.low, self._bus.high
        self._step = np.array([options.speed] * 5 + [options.gripper_speed]) / self.control_hz
        self._stopped: str | None = "it has just been connected"
        self._closed = False
        self._due = time.monotonic()
        self._target = self._bus.read()
        # Whether the last command closed the gripper, and the gripper's target at that time.
        self._closes, self._gripped_at = False, self._target[-1]

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(2 * len(JOINTS), len(JOINTS))

    def reset(self, seed: int) -> None:
        """See `RobotDriver`: at half speed, from the current position."""
        noise = np.array([self.options.noise] * 5 + [0.0]) * np.random.default_rng(seed).uniform(-1, 1, len(JOINTS))
        start = np.clip(np.array(self.options.start) + noise, self._low, self._high)
        self._target = np.clip(self._bus.read(), self._low, self._high)
        self._write(self._target)
        self._bus.hold(True)
        self._stopped, self._due = None, time.monotonic()
        way = start - self._target
        count = max(1, math.ceil(float(np.abs(way / (self._step / 2)).max())))
        begun = self._target
        for number in range(1, count + 1):
            self._write(begun + way * number / count)
            self._wait()
        self._closes, self._gripped_at = False, start[-1]
        for _ in range(math.ceil(_PATIENCE * self.control_hz)):
            if (np.abs(self._bus.read() - start) <= _ARRIVED).all():
                return
            self._wait()
        late = [joint for joint, off in zip(JOINTS, np.abs(self._bus.read() - start), strict=True) if off > _ARRIVED]
        self.stop()
        raise RobotError(
            f"the arm does not reach its start: {', '.join(late)}",
            where=self._where,
            help="look whether something holds it, or correct `options.start`",
        )

    def move(self, action: FloatArray) -> FloatArray:
        if self._stopped is not None:
            raise RobotStoppedError(self._stopped, where=self._where, help="look at the arm, then reset it")
        begun, measured = self._target, self._bus.read()
        lead = np.array([self.options.lead] * 5 + [100.0])
        # A target that is already ahead may stay there, or come back.
        low, high = np.minimum(measured - lead, begun), np.maximum(measured + lead, begun)
        self._write(np.clip(np.clip(begun + self._step * action, low, high), self._low, self._high))
        self._wait()
        return np.clip((self._target - begun) / self._step, -1, 1).astype(np.float32)

    def observe(self) -> Mapping[str, Array]:
        both = np.stack([self._bus.read(), self._target])
        shares = 2 * (both - self._low) / (self._high - self._low) - 1
        return {"states": shares.reshape(-1).astype(np.float32)}

    def stop(self) -> None:
        """See `RobotDriver`: the motors hold the arm where it is, so that it does not fall."""
        if self._stopped is None:
            self._stopped = "it was stopped"
            self._write(np.clip(self._bus.read(), self._low, self._high))

    def steer(self, motion: HandMotion) -> FloatArray:
        """See `RobotDriver`: each direction moves one joint; forward and up hold for a half-bent arm."""
        forward, left, up = motion.linear
        roll, pitch, _ = motion.angular
        # The gripper's number is a speed, and its motor holds the target.
        grip = 0.0 if not motion.moves_gripper else -1.0 if motion.gripper_closed else 1.0
        return np.array([-left, forward, -up, pitch, roll, grip], np.float32)

    def gripper_is_closed(self) -> bool:
        """See `RobotDriver`: by the last direction of its target."""
        return self._closes

    def follow(self, joints: NDArray[np.float64]) -> LeaderAction:
        """See `RobotDriver`: in degrees from the middle of the ranges, and percent of the gripper."""
        away = np.clip(joints, self._low, self._high) - self._target
        action = np.clip(away / self._step, -1, 1).astype(np.float32)
        return LeaderAction(action, dict(zip(JOINTS, away.tolist(), strict=True)))

    def faults(self) -> list[str]:
        return [] if self._bus.is_calibrated else ["the motors hold another calibration than the file"]

    def close(self) -> None:
        """See `RobotDriver`: the motors keep holding the arm."""
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
        finally:
            self._bus.close()

    def _write(self, target: NDArray[np.float64]) -> None:
        self._bus.write(target)
        way = target[-1] - self._gripped_at
        if abs(way) > _ARRIVED:
            self._closes, self._gripped_at = bool(way < 0), target[-1]
        self._target = target

    def _wait(self) -> None:
        self._due = max(self._due + 1 / self.control_hz, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))
