"""The driver of SO-101, by the contract of drivers, over a fake of lerobot's bus."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.real import so101
from recipes.embodied.envs.real.driver import check_driver, open_driver
from recipes.embodied.envs.real.so101 import SO101Driver, SO101Options
from recipes.embodied.interventions.intervention import HandMotion
from recipes.embodied.robots import so101_bus
from recipes.embodied.robots.robot_errors import (
    RobotError,
    RobotLinkLostError,
    RobotStoppedError,
    RobotUnreachableError,
)
from rlinf_core import ConfigError
from rlinf_core.hardware.robots.plugin_driven import SO101
from tests.unit.recipes.embodied.cameras.fake_cameras import lacking
from tests.unit.recipes.embodied.robots import fake_motors
from tests.unit.recipes.embodied.robots.fake_motors import HELD, FeetechMotorsBus


@pytest.fixture(autouse=True)
def _lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_motors.install(monkeypatch)
    monkeypatch.setattr(SO101Driver, "control_hz", 2000.0)


def arm(device: str = "/dev/ttyACM0", **extra: Any) -> SO101:
    return SO101(node_rank=0, device=device, **extra)


def driver(**options: Any) -> SO101Driver:
    made = SO101Driver(arm(), SO101Options.model_validate(options))
    made.reset(0)
    return made


def test_driver_keeps_its_promises() -> None:
    check_driver(lambda: SO101Driver(arm(), SO101Options(speed=360)))
    assert not any(bus.connected for bus in FeetechMotorsBus.made)
    assert FeetechMotorsBus.made[0].torque  # an arm without torque falls


def test_entry_without_a_driver_has_ours() -> None:
    made = open_driver(arm(options={"speed": 90}))
    assert isinstance(made, SO101Driver)
    assert made.options.speed == 90
    made.close()


def test_executed_is_the_change_of_the_target() -> None:
    made = driver(noise=0, lead=90)
    assert made.move(np.full(6, 0.5, np.float32)) == pytest.approx(np.full(6, 0.5), abs=1e-5)
    done = np.ones(6, np.float32)
    while done.any():
        done = made.move(np.ones(6, np.float32))
    assert done == pytest.approx(np.zeros(6))  # the ends of the ranges
    assert made.observe()["states"][6:] == pytest.approx(np.ones(6))
    made.close()


def test_target_does_not_run_away_from_a_held_arm() -> None:
    made = driver(noise=0, lead=5)
    FeetechMotorsBus.jammed = True
    for _ in range(1000):
        made.move(np.array([1, 0, 0, 0, 0, 0], np.float32))
    goal = FeetechMotorsBus.made[-1].goal["shoulder_pan"]
    assert goal - made.observe()["states"][0] * 90 == pytest.approx(5, abs=0.2)
    assert made.move(np.array([-1, 0, 0, 0, 0, 0], np.float32))[0] == pytest.approx(-1)
    made.close()


def test_arm_that_is_held_does_not_reach_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(so101, "_PATIENCE", 0.05)
    made = SO101Driver(arm(), SO101Options(start=(50, 0, 0, 0, 0, 50)))
    FeetechMotorsBus.jammed = True
    with pytest.raises(RobotError, match="does not reach its start: shoulder_pan"):
        made.reset(0)
    with pytest.raises(RobotStoppedError):
        made.move(np.zeros(6, np.float32))


def test_lost_bus_is_named() -> None:
    made = driver()
    FeetechMotorsBus.gone = True
    with pytest.raises(RobotLinkLostError, match="do not answer") as caught:
        made.move(np.zeros(6, np.float32))
    assert caught.value.where == "SO-101 at /dev/ttyACM0 of node 0"
    with pytest.raises(RobotUnreachableError, match="do not answer"):
        SO101Driver(arm("/dev/missing"), SO101Options())


def test_calibration_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    values = {joint: asdict(held) for joint, held in HELD.items()}
    file.write_text(json.dumps(values))
    made = SO101Driver(arm(calibration=str(file)), SO101Options())
    assert made.faults() == []
    made.close()
    values["gripper"]["range_max"] = 2000
    file.write_text(json.dumps(values))
    made = SO101Driver(arm(calibration=str(file)), SO101Options())
    assert "another calibration" in made.faults()[0]
    made.close()
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no calibration of an SO-101"):
        SO101Driver(arm(calibration=str(file)), SO101Options())


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(so101_bus, "missing_modules", lacking("lerobot"))
    with pytest.raises(ConfigError, match="needs the package `lerobot`") as caught:
        SO101Driver(arm(), SO101Options())
    assert "Python 3.12" in (caught.value.help or "")


def test_leader_is_followed_at_the_speed_of_the_arm() -> None:
    made = driver(noise=0, speed=45)
    following = made.follow(np.array([90.0, -1.0, 0, 0, 0, 50]))
    assert following.action == pytest.approx([1, -1, 0, 0, 0, 0])
    assert following.away["shoulder_pan"] == pytest.approx(90, abs=0.1)
    # A leader has ranges of its own; the arm goes to the end of its.
    assert made.follow(np.array([300.0, 0, 0, 0, 0, 50])).away["shoulder_pan"] == pytest.approx(90, abs=0.1)
    made.close()


def test_person_opens_and_closes_the_gripper() -> None:
    made = driver()
    assert made.steer(HandMotion((0, 1, 0), (0, 0, 0), gripper_closed=True)).tolist() == [-1, 0, 0, 0, 0, -1]
    assert made.steer(HandMotion((0, 0, 0), (0.5, 0, 0), gripper_closed=False)).tolist() == [0, 0, 0, 0, 0.5, 1]
    made.close()


def test_a_gripper_that_nobody_moves_keeps_its_target() -> None:
    made = driver()
    made.reset(0)
    assert not made.gripper_is_closed()
    for _ in range(200):
        made.move(np.array([0, 0, 0, 0, 0, -1], np.float32))
    made.move(np.array([0, 0, 0, 0, 0, 0.01], np.float32))
    assert made.gripper_is_closed()
    nudge = HandMotion((0, 1, 0), (0, 0, 0), gripper_closed=True, moves_gripper=False)
    assert made.steer(nudge).tolist() == [-1, 0, 0, 0, 0, 0]
    made.close()
