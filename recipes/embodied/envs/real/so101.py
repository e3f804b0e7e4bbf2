"""The driver of an SO-101 arm on a serial port, by lerobot's bus of Feetech motors.

Actions move the targets of five joints and of the gripper. The motors hold their targets by themselves: without further
commands the arm moves to its last target, at most `lead` degrees away, and rests there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from recipes.embodied.envs.env_spec import EnvSpec, FloatArray
from recipes.embodied.envs.real.driver import RobotDriver
from recipes.embodied.interventions.intervention import HandMotion, LeaderAction
from recipes.embodied.robots.robot_errors import RobotError, RobotStoppedError
from recipes.embodied.robots.so101_bus import JOINTS, SO101Bus
from recipes.training.arrays import Array
from rlinf_core.hardware.robots import SO101

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
