"""The cameras of a robot: what is observed, how old it may be, and what is said where one fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recipes.embodied.cameras import camera_set
from recipes.embodied.cameras.camera import CameraError, CameraFrame
from recipes.embodied.cameras.camera_set import CameraSet
from recipes.embodied.config.camera_config import RobotEnvOptions
from rlinf_core import ConfigError
from rlinf_core.hardware.robots.franka import Franka
from tests.unit.recipes.embodied.cameras import fake_cameras
from tests.unit.recipes.embodied.cameras.fake_cameras import Steady, install_realsense, lacking
from tests.waiting import until

FAKES = fake_cameras.__name__
WHERE = "Franka arm 10.0.0.1:17310 of node 2"


def options(**cameras: Any) -> RobotEnvOptions:
    return RobotEnvOptions.model_validate({"cameras": cameras})


def arm(*serials: str, camera_type: str = "realsense") -> Franka:
    values = {"node_rank": 2, "robot_ip": "10.0.0.1", "camera_serials": serials, "camera_type": camera_type}
    return Franka.model_validate(values)


@pytest.fixture(autouse=True)
def _few_cameras(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(camera_set, "FIRST_FRAME_SECONDS", 20.0)
    Steady.made = []
    yield
    until(lambda: all(camera.closed for camera in Steady.made), "every camera is closed")


def steady(**extra: Any) -> dict[str, Any]:
    return {"source": f"{FAKES}:Steady", "width": 16, "height": 16, **extra}


def test_newest_frames_in_order_and_size() -> None:
    cameras = CameraSet(options(front=steady(), wrist=steady(width=32, height=24)), arm(), WHERE)
    observed = cameras.observe()
    assert [(name, image.shape) for name, image in observed.items()] == [("front", (16, 16, 3)), ("wrist", (24, 32, 3))]
    assert [view.image.shape for view in cameras.views()] == [(48, 64, 3)] * 2
    ages = cameras.take_ages()
    assert {name: count for name, (_, count) in ages.items()} == {"front": 1, "wrist": 1}
    assert all(total >= 0 for total, _ in ages.values())
    assert cameras.take_ages() == {}
    cameras.close()
    cameras.close()


def test_frozen_camera_is_an_error() -> None:
    cameras = CameraSet(options(front=steady(max_age=0.05)), arm(), WHERE)
    Steady.made[0].frozen = True
    until(lambda: time.monotonic() - cameras.views()[0].taken > 0.05, "the frame is too old")
    for look in (cameras.observe, cameras.watch):
        with pytest.raises(
            CameraError, match=r"camera `front` has taken no frame for 0\.\d s; at most 0.05 s"
        ) as caught:
            look()
        assert caught.value.where == WHERE
        assert "cable" in (caught.value.help or "")
    assert "so the robot was stopped" in caught.value.after_stop().message
    cameras.close()


def test_failing_camera_is_an_error() -> None:
    cameras = CameraSet(options(front=steady()), arm(), WHERE)
    Steady.made[0].broken = True
    until(lambda: Steady.made[0].closed, "the reader has ended")
    with pytest.raises(CameraError, match="the cable is torn") as caught:
        cameras.observe()
    assert caught.value.where == WHERE
    cameras.close()


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (np.zeros((48, 64, 3), np.uint8), "gives ndarray and no `CameraFrame`"),
        (CameraFrame(np.zeros((3, 48, 64), np.uint8), 0.0), r"gives uint8\[3, 48, 64\]; pictures are RGB"),
        (CameraFrame(np.zeros((48, 64, 3), np.uint8), 1.8e9), "a frozen one could not be told"),
    ],
)
def test_frames_of_another_form_or_clock_are_refused(frame: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steady, "read", lambda camera, seconds: time.sleep(0.005) or frame)
    with pytest.raises(CameraError, match=said):
        CameraSet(options(front=steady()), arm(), WHERE)


def test_absent_camera_closes_the_others() -> None:
    with pytest.raises(CameraError, match="camera `wrist` has failed") as caught:
        CameraSet(options(front=steady(), wrist={"source": f"{FAKES}:Absent"}), arm(), WHERE)
    assert caught.value.why == "ValueError: no such device"
    assert Steady.made[0].closed


def test_silent_camera_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camera_set, "FIRST_FRAME_SECONDS", 0.05)
    with pytest.raises(CameraError, match="has given no frame within"):
        CameraSet(options(front={"source": f"{FAKES}:Silent"}), arm(), WHERE)


def test_cameras_take_serials_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install_realsense(monkeypatch)
    cameras = CameraSet(options(mine=steady(), front={}), arm("322142001230"), WHERE)
    assert cameras.serials == {"mine": None, "front": "322142001230"}
    states = {state.name: state for state in cameras.states()}
    assert (states["front"].source, states["front"].size) == ("realsense", (640, 480))
    cameras.close()


@pytest.mark.parametrize(
    ("camera", "robot", "message"),
    [
        ({"source": "realsense"}, arm(), "the camera `front` has no serial number"),
        ({}, arm("1", camera_type="zed"), "there is no driver for cameras of `camera_type: zed`"),
        ({"source": "json:dumps"}, arm(), "`json:dumps` is a function, not a class that extends `CameraDriver`"),
        ({"source": "scene"}, arm(), "`source: scene` shows a Franka arm"),
    ],
)
def test_cameras_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, camera: dict[str, Any], robot: Franka, message: str
) -> None:
    install_realsense(monkeypatch)
    with pytest.raises(ConfigError, match=message) as caught:
        CameraSet(options(front=camera), robot, WHERE)
    assert "options.cameras.front" in (caught.value.where or "")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camera_set, "missing_modules", lacking("cv2"))
    with pytest.raises(ConfigError, match="`source: v4l2` needs the package `cv2`") as caught:
        CameraSet(options(front={"source": "v4l2"}), arm("1"), WHERE)
    assert "rlinf-cli[cameras]" in (caught.value.help or "")


def test_one_frame_is_fitted_once() -> None:
    cameras = CameraSet(options(front=steady(max_age=60)), arm(), WHERE)
    Steady.made[0].frozen = True
    newest = [cameras.views()[0].taken]

    def rests() -> bool:
        time.sleep(0.02)
        newest.append(cameras.views()[0].taken)
        return newest[-1] == newest[-2]

    until(rests, "no further frame comes")
    first, again = cameras.observe()["front"], cameras.observe()["front"]
    assert first is again
    assert np.unique(first).tolist() == [7]
    cameras.close()
