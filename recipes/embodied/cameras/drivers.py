"""Camera drivers: their interface, Linux devices (V4L2, by OpenCV), Intel RealSense (pyrealsense2), and recordings.

Imports numpy but no vendor package. A custom camera is a subclass of `CameraDriver` with one method, `read`; `source:
package.module:Class` names it.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.pictures import decoded, read_video
from recipes.embodied.config.camera_config import CameraOptions
from rlinf_core.errors import RuntimeFailure

# The largest plausible age of a buffered frame, in seconds; a greater age comes from another clock.
_OLDEST: Final = 2.0


def taken_at(device_time: float, arrived: float) -> float:
    """Return the capture time of a frame, on `time.monotonic`.

    Args:
        device_time: the time by the device's clock.
        arrived: the arrival time of the frame, used if the device's time is later, or far earlier.
    """
    return device_time if arrived - _OLDEST <= device_time <= arrived else arrived


class CameraError(RuntimeFailure):
    """A camera does not exist, or has taken no frame for too long; `where` is the robot and its address."""

    def after_stop(self) -> CameraError:
        """Return the same error, noting that the robot was stopped because of it."""
        return CameraError(f"{self.message}, so the robot was stopped", where=self.where, why=self.why, help=self.help)


class CameraFrame(NamedTuple):
    """An image and its capture time.

    Attributes:
        image: uint8 [H, W, 3], RGB, upright.
        taken: the capture time, on `time.monotonic`, as for states.
    """

    image: NDArray[np.uint8]
    taken: float


class CameraView(NamedTuple):
    """An image that is shown to a person.

    Attributes:
        camera: the name of the camera.
        image: uint8 [H, W, 3], RGB, upright.
        taken: the capture time, on `time.monotonic`.
    """

    camera: str
    image: NDArray[np.uint8]
    taken: float


class ArmScene(NamedTuple):
    """The arm and the point to reach, for rendered views.

    Attributes:
        joints: [7], measured joint angles, in radians.
        target: [3], the point to reach, in metres; None: no such point.
        measured: the time of measurement, on `time.monotonic`.
    """

    joints: NDArray[np.float64]
    target: NDArray[np.float64] | None
    measured: float


class CameraSetup(NamedTuple):
    """The description of one camera for its driver.

    Attributes:
        name: its name in the observation.
        options: its entry in the job file.
        serial: serial number of the device, if it has one.
        scene: returns the current scene for rendered views; None: the robot has no scene.
    """

    name: str
    options: CameraOptions
    serial: str | None = None
    scene: Callable[[], ArmScene] | None = None


class CameraDriver(ABC):
    """A connection to one camera, opened, read and closed by one thread.

    Args:
        setup: the camera's description.

    Attributes:
        on_demand: whether `read` returns the present view at once, as a renderer does. It is then called on demand;
            otherwise a thread calls it continually.

    Raises:
        CameraError: the device does not exist.
    """

    on_demand: ClassVar[bool] = False

    def __init__(self, setup: CameraSetup) -> None:
        self.setup = setup

    @abstractmethod
    def read(self, seconds: float) -> CameraFrame | None:
        """Wait for the next frame.

        Returns:
            None if no frame has come within `seconds`.

        Raises:
            CameraError: the device is gone.
        """

    def close(self) -> None:  # noqa: B027 - some have nothing to give back
        """Release the device. Idempotent."""


# OpenCV and pyrealsense2 are optional packages; the latter is untyped.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false


# Symbolic links to devices; their names contain the serial numbers that USB cameras report.
BY_ID: Final = Path("/dev/v4l/by-id")
_NUMBERED: Final = re.compile(r"/dev/video(\d+)")
_PICTURES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


class V4l2Camera(CameraDriver):
    """A camera by its device file `path`, or by its serial number in `/dev/v4l/by-id`."""

    def __init__(self, setup: CameraSetup) -> None:
        super().__init__(setup)
        import cv2

        self._cv2: Any = cv2
        self._device = setup.options.path or device_of(setup)
        width, height = setup.options.capture
        numbered = _NUMBERED.fullmatch(os.path.realpath(self._device))
        # Every version of OpenCV opens V4L2 devices by number.
        self._capture: Any = None if numbered is None else cv2.VideoCapture(int(numbered[1]), cv2.CAP_V4L2)
        if self._capture is None or not self._capture.isOpened():
            raise CameraError(
                f"camera `{setup.name}` cannot be opened at `{self._device}`",
                help="check that the device exists, that no other process uses it, and that this user is of the group"
                " `video`",
            )
        for name, value in (
            (cv2.CAP_PROP_FRAME_WIDTH, width),
            (cv2.CAP_PROP_FRAME_HEIGHT, height),
            (cv2.CAP_PROP_FPS, setup.options.fps),
            (cv2.CAP_PROP_BUFFERSIZE, 1),  # keep the newest frame, not the oldest one
        ):
            self._capture.set(name, value)
        size = [round(self._capture.get(name)) for name in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)]
        if size != [width, height]:
            self.close()
            raise CameraError(
                f"camera `{setup.name}` takes pictures of {size[0]}x{size[1]}, not {width}x{height}",
                help=f"write `capture: {size}`, or another size of `v4l2-ctl --list-formats-ext`",
            )

    def read(self, seconds: float) -> CameraFrame | None:
        """See `CameraDriver`; V4L2 reports times on the monotonic clock."""
        read, picture = self._capture.read()
        now = time.monotonic()
        if not read:
            if not Path(self._device).exists():
                raise CameraError(f"camera `{self.setup.name}` is gone", why=f"`{self._device}` is no longer there")
            return None
        device_time = self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1000
        return CameraFrame(np.ascontiguousarray(picture[:, :, ::-1]), taken_at(device_time, now))

    def close(self) -> None:
        self._capture.release()


def device_of(setup: CameraSetup) -> str:
    """Return the device file of the camera with a serial number.

    Raises:
        CameraError: there is no such device, or several.
    """
    present = sorted(BY_ID.glob("*-video-index0")) if BY_ID.is_dir() else []
    serial = setup.serial or ""
    matching = [link for link in present if serial in link.name.removesuffix("-video-index0").split("_")]
    matching = matching or [link for link in present if serial in link.name]
    if len(matching) == 1:
        return str(matching[0])
    listed = ", ".join(link.name for link in present) or "none"
    what = "there are several cameras" if matching else "there is no camera"
    raise CameraError(
        f"camera `{setup.name}`: {what} with the serial number {serial}",
        why=f"cameras in {BY_ID}: {listed}",
        help="correct the serial number, or name the device file: `path: /dev/video0`",
    )


class RealsenseCamera(CameraDriver):
    """The color stream of a RealSense."""

    def __init__(self, setup: CameraSetup) -> None:
        super().__init__(setup)
        import pyrealsense2 as rs

        self._rs: Any = rs
        width, height = setup.options.capture
        config = rs.config()
        if setup.serial is not None:
            config.enable_device(setup.serial)
        config.enable_stream(rs.stream.color, width, height, rs.format.rgb8, round(setup.options.fps))
        self._pipeline: Any = rs.pipeline()
        try:
            self._pipeline.start(config)
        except RuntimeError as error:
            present = [str(device.get_info(rs.camera_info.serial_number)) for device in rs.context().query_devices()]
            raise CameraError(
                f"camera `{setup.name}` ({setup.serial}) cannot be started",
                why=f"{error}; RealSense cameras present: {', '.join(present) or 'none'}",
                help=f"check the serial number, and that it has a colour stream of {width}x{height} at"
                f" {setup.options.fps:g} frames a second",
            ) from error
        self._open = True

    def read(self, seconds: float) -> CameraFrame | None:
        """See `CameraDriver`; the capture time is the device's own if it reports that on this machine's clock."""
        arrived, frames = self._pipeline.try_wait_for_frames(round(1000 * seconds))
        now = time.monotonic()
        color = frames.get_color_frame() if arrived else None
        if not color:
            return None
        domain = self._rs.timestamp_domain
        known = color.get_frame_timestamp_domain() in (domain.system_time, domain.global_time)
        age = time.time() - color.get_timestamp() / 1000 if known else 0.0
        return CameraFrame(np.array(color.get_data(), np.uint8), taken_at(now - age, now))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._pipeline.stop()


class RecordedCamera(CameraDriver):
    """Replays the frames in `path` at `fps`, in a loop."""

    def __init__(self, setup: CameraSetup) -> None:
        super().__init__(setup)
        self._path = Path(setup.options.path or "").expanduser()
        self._files = (
            sorted(file for file in self._path.iterdir() if file.suffix.lower() in _PICTURES and file.is_file())
            if self._path.is_dir()
            else []
        )
        if not self._files and not self._path.is_file():
            what = "has no pictures" if self._path.is_dir() else "is neither a video nor a folder"
            raise self._broken(f"`{self._path}` {what}")
        self._pictures = self._repeated()
        self._due = time.monotonic()

    def read(self, seconds: float) -> CameraFrame | None:
        now = time.monotonic()
        if self._due - now > seconds:
            time.sleep(seconds)
            return None
        time.sleep(max(0.0, self._due - now))
        taken = time.monotonic()
        # A busy machine skips frames, as a camera does.
        self._due = max(self._due + 1 / self.setup.options.fps, taken)
        return CameraFrame(next(self._pictures), taken)

    def _repeated(self) -> Iterator[NDArray[np.uint8]]:
        while True:
            try:
                if self._files:
                    yield from (decoded(file.read_bytes()) for file in self._files)
                else:
                    yield from (picture for _, picture in read_video(self._path))
            except (DatasetError, OSError) as error:
                raise self._broken(str(error)) from error

    def _broken(self, why: str) -> CameraError:
        return CameraError(
            f"camera `{self.setup.name}` cannot be read", why=why, help="`path` is a video, or a folder of pictures"
        )
