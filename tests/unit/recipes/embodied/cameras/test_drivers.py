"""Drivers of cameras, against fakes of their packages and with real files: pictures, and moments on our clock."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recipes.demonstrations.pictures import write_video
from recipes.embodied.cameras import drivers
from recipes.embodied.cameras.camera import CameraError, CameraSetup, taken_at
from recipes.embodied.cameras.camera_set import fitted, middle
from recipes.embodied.cameras.drivers import RealsenseCamera, RecordedCamera, V4l2Camera
from recipes.embodied.config.camera_config import CameraOptions
from tests.unit.recipes.embodied.cameras.fake_cameras import HARDWARE_CLOCK, install_opencv, install_realsense


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
        assert frame is not None
        assert frame.taken >= before
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
        assert frame is not None
        assert frame.taken == pytest.approx(now - 0.5)
        assert sorted(capture.made[0].values.values()) == [1, 15, 480, 640]
        camera.close()
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


class TestFitting:
    def test_middle_is_cut_out(self) -> None:
        image = np.zeros((48, 64, 3), np.uint8)
        image[:, 8:56] = 100
        assert np.unique(fitted(image, CameraOptions(width=16, height=16))).tolist() == [100]
        assert middle(48, 64, 24, 8) == (24, 0, 40, 48)

    def test_crop_and_means(self) -> None:
        image = np.zeros((40, 40, 3), np.uint8)
        image[::2] = 100
        crop = fitted(image, CameraOptions(width=10, height=10, crop=(0, 0, 20, 20)))
        assert (crop.shape, np.unique(crop).tolist()) == ((10, 10, 3), [50])

    def test_right_size_is_left_alone(self) -> None:
        image = np.zeros((32, 16, 3), np.uint8)
        assert fitted(image, CameraOptions(width=16, height=32)) is image
