"""Intel RealSense cameras, by their serial numbers (pyrealsense2)."""

# pyrealsense2 is an optional package, whose binary module has no types.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import time
from typing import Any

import numpy as np

from recipes.embodied.cameras.camera import CameraDriver, CameraError, CameraFrame, CameraSetup, taken_at


class RealsenseCamera(CameraDriver):
    """The colour stream of a RealSense."""

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
        """See `CameraDriver`; the time is the device's own where it reports it on this machine's clock."""
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
        """See `CameraDriver`."""
        if self._open:
            self._open = False
            self._pipeline.stop()
