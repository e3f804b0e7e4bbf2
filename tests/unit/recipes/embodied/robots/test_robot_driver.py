"""Robots of one's own and SO-101: drivers, the claim on a robot, and the environment that is made of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray
from recipes.embodied.envs.real import so101
from recipes.embodied.envs.real.driver import (
    DriverContractError,
    RobotDriver,
    check_driver,
    measured_score,
    open_driver,
)
from recipes.embodied.envs.real.so101 import SO101Driver, SO101Options
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.intervention import HandMotion
from recipes.embodied.robots.robot_errors import (
    RobotCheckError,
    RobotError,
    RobotLeaseError,
    RobotLinkLostError,
    RobotStoppedError,
    RobotUnreachableError,
)
from recipes.embodied.robots.robot_session import RobotClaim, claim_file, claimed_by
from rlinf_core import ConfigError, RLinfError
from rlinf_core.hardware.robots import SO101, GenericRobot
from tests.known import known
from tests.unit.recipes.embodied.cameras.fake_cameras import lacking
from tests.unit.recipes.embodied.robots import fake_motors
from tests.unit.recipes.embodied.robots.fake_motors import HELD, FeetechMotorsBus


class Slide(RobotDriver):
    """A slide on one axis, a metre long, that pretends to be there."""

    made: list[Slide]

    def __init__(self, robot: Any, options: Any = None) -> None:
        super().__init__(robot, options)
        self.at, self.stopped, self.closed = 0.5, True, False
        self.asked: list[float] = []
        Slide.made.append(self)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(1, 1)

    def reset(self, seed: int) -> None:
        self.at, self.stopped = 0.5, False

    def move(self, action: FloatArray) -> FloatArray:
        if self.stopped:
            raise RobotStoppedError("it was stopped")
        self.asked.append(float(action[0]))
        before, self.at = self.at, float(np.clip(self.at + action[0], 0, 1))
        return np.array([self.at - before], np.float32)

    def observe(self) -> Mapping[str, NDArray[Any]]:
        return {"states": np.array([self.at], np.float32)}

    def score(self) -> tuple[float, bool]:
        return self.at, self.at == 1

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        super().close()
        self.closed = True


class Massive(Slide):
    """One with a mass and a noisy sensor: it lags behind its target, and rolls on after a stop."""

    obeys = True

    def __init__(self, robot: Any, options: Any = None) -> None:
        super().__init__(robot, options)
        self.control_hz, self.speed, self.noise = 2000.0, 0.0, np.random.default_rng(0)

    def move(self, action: FloatArray) -> FloatArray:
        if self.stopped:
            self.at += 0 if self.obeys else float(action[0])
            raise RobotStoppedError("it was stopped")
        self.speed = 0.9 * self.speed + 0.1 * float(action[0])
        return action

    def observe(self) -> Mapping[str, NDArray[Any]]:
        self.speed *= 0.8 if self.stopped else 1.0
        self.at += self.speed
        return {"states": np.array([self.at + 1e-4 * self.noise.uniform(-1, 1)], np.float32)}


class Disobedient(Massive):
    obeys = False


class Deaf(Slide):
    def stop(self) -> None:
        pass


class Choosing(Slide):
    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(1, 1, num_choices=3)


class Broken(Slide):
    def move(self, action: FloatArray) -> FloatArray:
        raise RobotError("the belt is torn")


class Blind(Slide):
    def observe(self) -> Mapping[str, NDArray[Any]]:
        if self.asked:
            raise RobotError("the sensor is gone")
        return super().observe()


class Silent(Slide):
    def move(self, action: FloatArray) -> FloatArray:
        super().move(action)
        return None  # pyright: ignore[reportReturnType] - as where `return` was forgotten


class Unknowing(Slide):
    def move(self, action: FloatArray) -> FloatArray:
        return super().move(action) * np.float32("nan")


class Scoring(Slide):
    def score(self) -> Any:
        return self.options


class Runaway(Broken):
    def stop(self) -> None:
        raise RobotError("the line is dead")


class Unfit(Slide):
    def faults(self) -> list[str]:
        return ["the belt is torn"]


@pytest.fixture(autouse=True)
def _own_robots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Slide.made = []


def robot(driver: str = "Slide", **extra: Any) -> GenericRobot:
    return GenericRobot(node_rank=0, address="/dev/slide0", driver=f"{__name__}:{driver}", **extra)


def settings(unit: GenericRobot, **extra: Any) -> EnvSettings:
    return EnvSettings(num_envs=1, hardware=(unit,), **extra)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Slide, None),
        (Massive, None),
        (Disobedient, "more than the robot drifts without one"),
        (Deaf, "moves after `stop`"),
    ],
)
def test_the_contract_of_drivers(kind: type[Slide], words: str | None) -> None:
    with nullcontext() if words is None else pytest.raises(DriverContractError, match=words):
        check_driver(lambda: kind(robot()))


@pytest.mark.parametrize(
    ("driver", "message"),
    [("no_such_module:Driver", "no_such_module"), ("json:dumps", "not a class that extends `RobotDriver`")],
)
def test_a_driver_that_is_none_is_told(driver: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_driver(robot().model_copy(update={"driver": driver}))


def test_what_the_robot_did_is_what_is_learned_from() -> None:
    env = make_env("robot", settings(robot(), task="go to the end"))
    observed = env.reset(0)
    assert observed["instructions"].tolist() == ["go to the end"]
    result = env.step(np.full((1, 1, 1), 0.9, np.float32))
    assert known(result.executed)[0, 0, 0] == pytest.approx(0.5)
    assert (result.rewards[0, 0], result.terminations[0, 0]) == (1, True)
    assert result.episodes is not None
    assert known(result.episodes.success_once).tolist() == [True]
    env.step(np.full((1, 1, 1), -7, np.float32))
    assert Slide.made[0].asked[-1] == -1  # beyond the largest
    env.close()


def test_training_and_evaluation_take_turns_on_one_connection() -> None:
    train, test = (make_env("robot", settings(robot(), seed=seed)) for seed in (0, 1))
    train.reset(0)
    test.reset(0)
    assert len(Slide.made) == 1
    train.close()
    assert not Slide.made[0].closed
    assert claimed_by("/dev/slide0") is not None
    test.close()
    assert Slide.made[0].closed
    assert claimed_by("/dev/slide0") is None


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("Broken", "the belt is torn"),
        ("Blind", "the sensor is gone"),
        ("Silent", "`move` does not return the executed action"),
        ("Unknowing", "`move` does not return the executed action"),
    ],
)
def test_an_error_stops_the_robot(driver: str, message: str) -> None:
    env = make_env("robot", settings(robot(driver)))
    env.reset(0)
    with pytest.raises(RLinfError, match=message):
        env.step(np.zeros((1, 1, 1), np.float32))
    assert Slide.made[0].stopped
    env.close()


@pytest.mark.parametrize("score", [1.0, (1.0,), (1.0, 1), ("1", True), (np.ones(1), True), [1.0, True]])
def test_a_score_is_a_number_and_a_truth(score: Any) -> None:
    with pytest.raises(DriverContractError, match="`score` returns"):
        measured_score(Scoring(robot(), score))
    assert measured_score(Scoring(robot(), (np.float32(0.5), np.bool_(True)))) == (0.5, True)


def test_a_robot_that_cannot_be_stopped_is_told() -> None:
    env = make_env("robot", settings(robot("Runaway")))
    env.reset(0)
    with pytest.raises(RobotError, match="could not be stopped") as caught:
        env.step(np.zeros((1, 1, 1), np.float32))
    assert "the belt is torn" in (caught.value.why or "")
    assert "the line is dead" in (caught.value.why or "")
    with pytest.raises(RobotError, match="the line is dead"):
        env.close()
    assert claimed_by("/dev/slide0") is None


def test_a_robot_that_is_not_fit_is_given_back() -> None:
    with pytest.raises(RobotCheckError, match="belt is torn"):
        make_env("robot", settings(robot("Unfit")))
    assert Slide.made[0].closed
    assert claimed_by("/dev/slide0") is None
    make_env("robot", settings(robot("Unfit", disable_validate=True))).close()


def test_a_driver_of_choices_is_refused() -> None:
    with pytest.raises(DriverContractError, match="`spec` has `num_choices`, but `move` takes numbers"):
        make_env("robot", settings(robot("Choosing")))
    assert Slide.made[-1].closed


def test_a_robot_belongs_to_one_process_until_that_is_killed(tmp_path: Path) -> None:
    code = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from recipes.embodied.robots.robot_session import RobotClaim\n"
        "claim = RobotClaim('/dev/slide0'); print('mine', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert known(other.stdout).readline() == "mine\n"
        with pytest.raises(RobotLeaseError, match=f"process {other.pid} on"):
            make_env("robot", settings(robot()))
        other.kill()
        other.wait()
    with RobotClaim("/dev/slide0"):
        pass


def test_the_environment_needs_a_robot_with_a_driver() -> None:
    with pytest.raises(ConfigError, match="owns none"):
        make_env("robot", EnvSettings(num_envs=1))


def test_a_claim_writes_through_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    claim_file("10.0.0.9").symlink_to(precious)
    with pytest.raises(RobotLeaseError, match="symbolic links"):
        RobotClaim("10.0.0.9")
    assert precious.read_text() == "kept"


def test_what_is_in_the_place_of_a_claim_is_told() -> None:
    os.mkfifo(claim_file("a"))
    assert claimed_by("a") is not None
    with RobotClaim("b"):
        claim_file("b").write_text("\x1b]0;x\x07me")
        assert "\x1b" not in str(claimed_by("b"))


@pytest.fixture(autouse=True)
def _lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_motors.install(monkeypatch)
    monkeypatch.setattr(SO101Driver, "control_hz", 2000.0)


def arm(device: str = "/dev/ttyACM0", **extra: Any) -> SO101:
    return SO101(node_rank=0, device=device, **extra)


@pytest.fixture
def driver() -> Iterator[Callable[..., SO101Driver]]:
    drivers: list[SO101Driver] = []

    def made(**options: Any) -> SO101Driver:
        drivers.append(SO101Driver(arm(), SO101Options.model_validate(options)))
        drivers[-1].reset(0)
        return drivers[-1]

    yield made
    FeetechMotorsBus.gone = False
    for one in drivers:
        one.close()


Drive = Callable[..., SO101Driver]


def test_driver_keeps_its_promises() -> None:
    check_driver(lambda: SO101Driver(arm(), SO101Options(speed=360)))
    assert not any(bus.connected for bus in FeetechMotorsBus.made)
    assert FeetechMotorsBus.made[0].torque  # an arm without torque falls


def test_entry_without_a_driver_has_ours() -> None:
    made = open_driver(arm(options={"speed": 90}))
    assert isinstance(made, SO101Driver)
    assert made.options.speed == 90
    made.close()


def test_executed_is_the_change_of_the_target(driver: Drive) -> None:
    made = driver(noise=0, lead=90)
    assert made.move(np.full(6, 0.5, np.float32)) == pytest.approx(np.full(6, 0.5), abs=1e-5)
    done = np.ones(6, np.float32)
    while done.any():
        done = made.move(np.ones(6, np.float32))
    assert done == pytest.approx(np.zeros(6))  # the ends of the ranges
    assert made.observe()["states"][6:] == pytest.approx(np.ones(6))


def test_target_does_not_run_away_from_a_held_arm(driver: Drive) -> None:
    made = driver(noise=0, lead=5)
    FeetechMotorsBus.jammed = True
    for _ in range(1000):
        made.move(np.array([1, 0, 0, 0, 0, 0], np.float32))
    goal = FeetechMotorsBus.made[-1].goal["shoulder_pan"]
    assert goal - made.observe()["states"][0] * 90 == pytest.approx(5, abs=0.2)
    assert made.move(np.array([-1, 0, 0, 0, 0, 0], np.float32))[0] == pytest.approx(-1)


def test_arm_that_is_held_does_not_reach_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(so101, "_PATIENCE", 0.05)
    made = SO101Driver(arm(), SO101Options(start=(50, 0, 0, 0, 0, 50)))
    FeetechMotorsBus.jammed = True
    with pytest.raises(RobotError, match="does not reach its start: shoulder_pan"):
        made.reset(0)
    with pytest.raises(RobotStoppedError):
        made.move(np.zeros(6, np.float32))


def test_lost_bus_is_named(driver: Drive) -> None:
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
    monkeypatch.setattr(so101, "missing_modules", lacking("lerobot"))
    with pytest.raises(ConfigError, match="needs the package `lerobot`") as caught:
        SO101Driver(arm(), SO101Options())
    assert "Python 3.12" in (caught.value.help or "")


def test_leader_is_followed_at_the_speed_of_the_arm(driver: Drive) -> None:
    made = driver(noise=0, speed=45)
    following = made.follow(np.array([90.0, -1.0, 0, 0, 0, 50]))
    assert following.action == pytest.approx([1, -1, 0, 0, 0, 0])
    assert following.away["shoulder_pan"] == pytest.approx(90, abs=0.1)
    # A leader has ranges of its own; the arm goes to the end of its.
    assert made.follow(np.array([300.0, 0, 0, 0, 0, 50])).away["shoulder_pan"] == pytest.approx(90, abs=0.1)


def test_person_opens_and_closes_the_gripper(driver: Drive) -> None:
    made = driver()
    assert made.steer(HandMotion((0, 1, 0), (0, 0, 0), gripper_closed=True)).tolist() == [-1, 0, 0, 0, 0, -1]
    assert made.steer(HandMotion((0, 0, 0), (0.5, 0, 0), gripper_closed=False)).tolist() == [0, 0, 0, 0, 0.5, 1]


def test_a_gripper_that_nobody_moves_keeps_its_target(driver: Drive) -> None:
    made = driver()
    assert not made.gripper_is_closed()
    for _ in range(200):
        made.move(np.array([0, 0, 0, 0, 0, -1], np.float32))
    made.move(np.array([0, 0, 0, 0, 0, 0.01], np.float32))
    assert made.gripper_is_closed()
    nudge = HandMotion((0, 1, 0), (0, 0, 0), gripper_closed=True, moves_gripper=False)
    assert made.steer(nudge).tolist() == [-1, 0, 0, 0, 0, 0]
