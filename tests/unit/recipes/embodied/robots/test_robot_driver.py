"""Robots of one's own: drivers, the claim on a robot, and the environment that is made of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, FloatArray
from recipes.embodied.envs.real.driver import DriverContractError, RobotDriver, check_driver, open_driver
from recipes.embodied.envs.registry import make_env
from recipes.embodied.robots.claim import RobotClaim, claim_file, claimed_by
from recipes.embodied.robots.robot_errors import RobotCheckError, RobotError, RobotLeaseError, RobotStoppedError
from rlinf_core import ConfigError, RLinfError
from rlinf_core.hardware.robots.plugin_driven import GenericRobot


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


class Unfit(Slide):
    def faults(self) -> list[str]:
        return ["the belt is torn"]


@pytest.fixture(autouse=True)
def _own_robots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Slide.made = []
    return


def robot(driver: str = "Slide", **extra: Any) -> GenericRobot:
    return GenericRobot(node_rank=0, address="/dev/slide0", driver=f"{__name__}:{driver}", **extra)


def settings(unit: GenericRobot, **extra: Any) -> EnvSettings:
    return EnvSettings(num_envs=1, hardware=(unit,), **extra)


def test_a_driver_that_keeps_its_promises_passes() -> None:
    check_driver(lambda: Slide(robot()))


def test_a_robot_with_mass_and_noise_keeps_its_promises() -> None:
    check_driver(lambda: Massive(robot()))


def test_a_motion_beyond_the_drift_after_a_stop_is_told() -> None:
    with pytest.raises(DriverContractError, match="more than the robot drifts without one"):
        check_driver(lambda: Disobedient(robot()))


def test_a_driver_that_does_not_stop_is_told() -> None:
    with pytest.raises(DriverContractError, match="moves after `stop`"):
        check_driver(lambda: Deaf(robot()))


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
    assert result.executed is not None
    assert result.executed[0, 0, 0] == pytest.approx(0.5)
    assert (result.rewards[0, 0], result.terminations[0, 0]) == (1, True)
    assert result.episodes is not None
    assert result.episodes.success_once is not None
    assert result.episodes.success_once.tolist() == [True]
    env.close()


def test_actions_beyond_the_largest_are_those() -> None:
    env = make_env("robot", settings(robot()))
    env.reset(0)
    env.step(np.full((1, 1, 1), -7, np.float32))
    assert Slide.made[0].asked == [-1]
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


def test_a_robot_that_is_not_fit_is_given_back() -> None:
    with pytest.raises(RobotCheckError, match="belt is torn"):
        make_env("robot", settings(robot("Unfit")))
    assert Slide.made[0].closed
    assert claimed_by("/dev/slide0") is None
    make_env("robot", settings(robot("Unfit", disable_validate=True))).close()


def test_a_robot_belongs_to_one_process_until_that_is_killed(tmp_path: Path) -> None:
    code = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from recipes.embodied.robots.claim import RobotClaim\n"
        "claim = RobotClaim('/dev/slide0'); print('mine', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(RobotLeaseError, match=f"process {other.pid} on"):
            make_env("robot", settings(robot()))
        other.kill()
        other.wait()
    with RobotClaim("/dev/slide0"):
        pass


def test_the_environment_needs_a_robot_with_a_driver() -> None:
    with pytest.raises(ConfigError, match="owns none"):
        make_env("robot", EnvSettings(num_envs=1))


def test_a_claim_writes_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    precious = tmp_path / "precious"
    precious.write_text("kept")
    claim_file("10.0.0.9").symlink_to(precious)
    with pytest.raises(RobotLeaseError, match="symbolic links"):
        RobotClaim("10.0.0.9")
    assert precious.read_text() == "kept"


def test_what_is_in_the_place_of_a_claim_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    os.mkfifo(claim_file("a"))
    assert claimed_by("a") is not None
    with RobotClaim("b"):
        claim_file("b").write_text("\x1b]0;x\x07me")
        assert "\x1b" not in str(claimed_by("b"))
