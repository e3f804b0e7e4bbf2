"""The cameras of a robot, and their drivers against fakes of packages and with real files: pictures, ages, failures."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.demonstrations.pictures import write_video
from recipes.embodied.cameras import camera_set, drivers
from recipes.embodied.cameras.camera_set import CameraSet, fitted, middle
from recipes.embodied.cameras.drivers import (
    CameraError,
    CameraFrame,
    CameraSetup,
    RealsenseCamera,
    RecordedCamera,
    V4l2Camera,
    taken_at,
)
from recipes.embodied.config.camera_config import CameraOptions, RobotEnvOptions
from rlinf_core import ConfigError
from rlinf_core.hardware.franka import Franka
from tests.known import known
from tests.unit.recipes.embodied.cameras import fake_cameras
from tests.unit.recipes.embodied.cameras.fake_cameras import (
    HARDWARE_CLOCK,
    Steady,
    install_opencv,
    install_realsense,
    lacking,
)
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


@pytest.mark.parametrize("fails", ["frozen", "broken"])
def test_failing_camera_is_an_error(fails: str) -> None:
    cameras = CameraSet(options(front=steady(max_age=0.05)), arm(), WHERE)
    setattr(Steady.made[0], fails, True)
    if fails == "frozen":
        until(lambda: time.monotonic() - cameras.views()[0].taken > 0.05, "the frame is too old")
        message = r"camera `front` has taken no frame for 0\.\d s; at most 0.05 s"
    else:
        until(lambda: Steady.made[0].closed, "the reader has ended")
        message = "the cable is torn"
    for look in (cameras.observe, cameras.watch):
        with pytest.raises(CameraError, match=message) as caught:
            look()
        assert caught.value.where == WHERE
        assert "cable" in f"{caught.value.message} {caught.value.help}"
        assert "so the robot was stopped" in caught.value.after_stop().message
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


def test_crop_beyond_the_frames_is_refused() -> None:
    with pytest.raises(CameraError, match=r"of 64x48, beyond which `crop: \[0, 0, 64, 49\]` reaches"):
        CameraSet(options(front=steady(crop=[0, 0, 64, 49])), arm(), WHERE)


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


def test_a_frame_stays_while_its_buffer_is_used_again() -> None:
    cameras = CameraSet(options(front=steady(source=f"{FAKES}:Reusing", width=64, height=48)), arm(), WHERE)
    first = cameras.observe()["front"]
    kept = first.copy()
    until(lambda: cameras.observe()["front"][0, 0, 0] != kept[0, 0, 0], "another frame comes")
    assert np.array_equal(first, kept)
    cameras.close()


def setup(serial: str | None = None, **options: Any) -> CameraSetup:
    return CameraSetup("front", CameraOptions.model_validate(options), serial)


def test_moment_of_another_clock_is_that_of_arrival() -> None:
    assert taken_at(99.9, 100.0) == 99.9
    assert [taken_at(value, 100.0) for value in (100.1, 0.0, 1.7e9)] == [100.0] * 3


class TestRealsense:
    def test_frames_and_their_age(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pipeline = install_realsense(monkeypatch)
        camera = RealsenseCamera(setup("322142001230", capture=[848, 480]))
        pipeline.stamp = 1000 * (time.time() - 0.2)
        frame, now = camera.read(0.1), time.monotonic()
        assert frame is not None
        assert (frame.image.shape, frame.image[0, 0].tolist()) == ((480, 848, 3), [200, 0, 0])
        assert frame.taken <= now - 0.2 + 0.001
        pipeline.domain = HARDWARE_CLOCK
        before = time.monotonic()
        frame = camera.read(0.1)
        assert known(frame).taken >= before
        camera.close()
        camera.close()
        assert pipeline.stopped == 1

    def test_other_serials_are_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install_realsense(monkeypatch)
        with pytest.raises(CameraError, match=r"camera `front` \(77\) cannot be started") as caught:
            RealsenseCamera(setup("77"))
        assert "322142001230" in (caught.value.why or "")


class TestV4l2:
    def test_frames_by_device_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        capture = install_opencv(monkeypatch)
        link = tmp_path / "front"
        link.symlink_to("/dev/video3")
        camera = V4l2Camera(setup(source="v4l2", path=str(link), fps=15))
        assert capture.made[0].number == 3
        frame, now = camera.read(0.1), time.monotonic()
        assert frame is not None
        assert frame.image[0, 0].tolist() == [0, 0, 200]
        assert frame.taken <= now
        capture.stamp = now - 0.5
        frame = camera.read(0.1)
        assert known(frame).taken == pytest.approx(now - 0.5)
        assert sorted(capture.made[0].values.values()) == [1, 15, 480, 640]
        camera.close()
        assert capture.made[0].released

    def test_another_size_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        capture = install_opencv(monkeypatch)
        capture.most = 1280
        with pytest.raises(CameraError, match="takes pictures of 1280x1080, not 1920x1080") as caught:
            V4l2Camera(setup(source="v4l2", path="/dev/video3", capture=[1920, 1080]))
        assert "`capture: [1280, 1080]`" in (caught.value.help or "")
        assert capture.made[0].released

    def test_no_frame_and_no_device(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        capture = install_opencv(monkeypatch)
        monkeypatch.setattr(drivers, "_NUMBERED", re.compile(r".*/video(\d+)"))
        device = tmp_path / "video0"
        device.touch()
        camera = V4l2Camera(setup(source="v4l2", path=str(device)))
        capture.reads = False
        assert camera.read(0.1) is None
        device.unlink()
        with pytest.raises(CameraError, match="camera `front` is gone"):
            camera.read(0.1)
        for absent in ("/dev/video9", "/dev/null"):
            with pytest.raises(CameraError, match="cannot be opened") as caught:
                V4l2Camera(setup(source="v4l2", path=absent))
            assert "group `video`" in (caught.value.help or "")

    def test_device_by_serial(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install_opencv(monkeypatch)
        monkeypatch.setattr(drivers, "BY_ID", tmp_path)
        for number, serial in enumerate(("12", "123")):
            (tmp_path / f"usb-ACME_Cam_{serial}-video-index0").symlink_to(f"/dev/video{2 * number}")
            (tmp_path / f"usb-ACME_Cam_{serial}-video-index1").symlink_to(f"/dev/video{2 * number + 1}")
        camera = V4l2Camera(setup("12", source="v4l2"))
        assert camera.read(0.1) is not None
        for serial, message in (("9", "no camera with the serial number 9"), ("Cam", "several cameras")):
            with pytest.raises(CameraError, match=message) as caught:
                V4l2Camera(setup(serial, source="v4l2"))
            assert "usb-ACME_Cam_123" in (caught.value.why or "")


class TestRecorded:
    def shades(self, camera: RecordedCamera, count: int) -> list[int]:
        shades: list[int] = []
        while len(shades) < count:
            frame = camera.read(1.0)
            if frame is not None:
                shades.append(int(frame.image[0, 0, 0]))
        return shades

    def test_folder_of_pictures_begins_anew(self, tmp_path: Path) -> None:
        for shade in (10, 20, 30):
            Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(tmp_path / f"{shade}.png")
        (tmp_path / "notes.txt").touch()
        camera = RecordedCamera(setup(source="file", path=str(tmp_path), fps=1000))
        assert self.shades(camera, 5) == [10, 20, 30, 10, 20]

    def test_video_begins_anew(self, tmp_path: Path) -> None:
        film = tmp_path / "film.mp4"
        write_video(film, [np.full((32, 32, 3), shade, np.uint8) for shade in (40, 200)], 10)
        camera = RecordedCamera(setup(source="file", path=str(film), fps=1000))
        dark, bright, again = self.shades(camera, 3)
        assert dark < 80 < bright
        assert again == dark

    def test_slow_recording_gives_no_frame_in_time(self, tmp_path: Path) -> None:
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "0.png")
        camera = RecordedCamera(setup(source="file", path=str(tmp_path), fps=0.001))
        assert camera.read(0.01) is not None
        assert camera.read(0.01) is None

    @pytest.mark.parametrize("name", ["nowhere", "empty", "broken"])
    def test_unusable_path(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "broken").write_bytes(b"no film")
        with pytest.raises(CameraError, match="camera `front` cannot be read") as caught:
            RecordedCamera(setup(source="file", path=str(tmp_path / name))).read(0.1)
        assert name in (caught.value.why or "")


def test_pictures_are_fitted_by_their_middle_a_crop_and_means() -> None:
    image = np.zeros((48, 64, 3), np.uint8)
    image[:, 8:56] = 100
    assert np.unique(fitted(image, CameraOptions(width=16, height=16))).tolist() == [100]
    assert middle(48, 64, 24, 8) == (24, 0, 40, 48)
    striped = np.zeros((40, 40, 3), np.uint8)
    striped[::2] = 100
    crop = fitted(striped, CameraOptions(width=10, height=10, crop=(0, 0, 20, 20)))
    assert (crop.shape, np.unique(crop).tolist()) == ((10, 10, 3), [50])
    assert fitted(image, CameraOptions(width=64, height=48)) is image
