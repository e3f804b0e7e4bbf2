"""As much of lerobot's bus of Feetech motors as arms and leaders use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from recipes.embodied.envs.real.so101 import JOINTS


class MotorNormMode(Enum):
    DEGREES, RANGE_0_100 = "degrees", "range_0_100"


@dataclass
class MotorCalibration:
    id: int
    drive_mode: int
    homing_offset: int
    range_min: int
    range_max: int


@dataclass
class Motor:
    id: int
    model: str
    norm_mode: MotorNormMode


HELD = {joint: MotorCalibration(number, 0, 0, 1024, 3072) for number, joint in enumerate(JOINTS, 1)}


class FeetechMotorsBus:
    """Motors that go two thirds of the way to their goals each time they are read.

    Attributes:
        gone: the cable is torn.
        jammed: the motors do not move.
    """

    gone = jammed = False
    made: list[FeetechMotorsBus]

    def __init__(self, port: str, motors: dict[str, Motor], calibration: Any) -> None:
        self.port, self.motors, self.calibration = port, motors, calibration
        self.at = dict.fromkeys(motors, 10.0)
        self.goal, self.torque, self.connected = dict(self.at), False, False
        FeetechMotorsBus.made.append(self)

    def connect(self) -> None:
        if self.port == "/dev/missing":
            raise ConnectionError("Could not connect on port")
        self.connected = True

    @property
    def is_calibrated(self) -> bool:
        return self.calibration == HELD

    def read_calibration(self) -> Any:
        return dict(HELD)

    def enable_torque(self) -> None:
        self.torque = True

    def disable_torque(self) -> None:
        self.torque = False

    def sync_read(self, name: str, num_retry: int) -> dict[str, float]:
        if self.gone:
            raise ConnectionError("no status packet")
        moves = self.torque and not self.jammed
        self.at = {joint: at + (self.goal[joint] - at) * 2 / 3 * moves for joint, at in self.at.items()}
        return dict(self.at)

    def sync_write(self, name: str, goals: dict[str, float]) -> None:
        if self.gone:
            raise ConnectionError("no status packet")
        self.goal = dict(goals)

    def disconnect(self, disable_torque: bool) -> None:
        self.connected, self.torque = False, self.torque and not disable_torque


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import lerobot.motors` find these for the rest of a test."""
    FeetechMotorsBus.made = []
    FeetechMotorsBus.gone = FeetechMotorsBus.jammed = False
    for name, contents in (
        ("lerobot", {}),
        ("lerobot.motors", {kind.__name__: kind for kind in (Motor, MotorCalibration, MotorNormMode)}),
        ("lerobot.motors.feetech", {"FeetechMotorsBus": FeetechMotorsBus}),
    ):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
