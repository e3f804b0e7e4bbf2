"""Cameras of Linux (V4L2), read by OpenCV: webcams, capture cards, most USB cameras."""

# OpenCV is an optional package.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from recipes.embodied.cameras.camera import CameraDriver, CameraError, CameraFrame, CameraSetup, taken_at

# Links of devices, whose names hold the serial numbers that USB cameras report.
BY_ID: Final = Path("/dev/v4l/by-id")
_NUMBERED: Final = re.compile(r"/dev/video(\d+)")


class V4l2Camera(CameraDriver):
    """A camera by its device file `path`, or by its serial number in `/dev/v4l/by-id`."""

    def __init__(self, setup: CameraSetup) -> None:
        super().__init__(setup)
        import cv2

        self._cv2: Any = cv2
        self._device = setup.options.path or device_of(setup)
        width, height = setup.options.capture
        numbered = _NUMBERED.fullmatch(os.path.realpath(self._device))
        # By number, as every version of OpenCV opens devices of V4L2.
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
            (cv2.CAP_PROP_BUFFERSIZE, 1),  # the newest frame, not the oldest one that waits
        ):
            self._capture.set(name, value)

    def read(self, seconds: float) -> CameraFrame | None:
        """See `CameraDriver`; V4L2 reports the time on the monotonic clock."""
        read, picture = self._capture.read()
        now = time.monotonic()
        if not read:
            if not Path(self._device).exists():
                raise CameraError(f"camera `{self.setup.name}` is gone", why=f"`{self._device}` is no longer there")
            return None
        device_time = self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1000
        return CameraFrame(np.ascontiguousarray(picture[:, :, ::-1]), taken_at(device_time, now))

    def close(self) -> None:
        """See `CameraDriver`."""
        self._capture.release()


def device_of(setup: CameraSetup) -> str:
    """Return the device file of the camera with a serial number.

    Raises:
        CameraError: it does not exist, or there are several.
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
