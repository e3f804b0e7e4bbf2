"""As much of pyrealsense2 and of OpenCV as the drivers of cameras use."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.embodied.cameras.drivers import CameraDriver, CameraError, CameraFrame, CameraSetup

SYSTEM_TIME, HARDWARE_CLOCK, GLOBAL_TIME = "system", "hardware", "global"


class Steady(CameraDriver):
    """A camera of one's own that takes a frame whenever it is asked, until `frozen` or `broken`."""

    made: list[Steady]

    def __init__(self, setup: CameraSetup) -> None:
        super().__init__(setup)
        self.frozen = self.broken = self.closed = False
        Steady.made.append(self)

    def read(self, seconds: float) -> CameraFrame | None:
        time.sleep(0.005)
        if self.broken:
            raise CameraError("the cable is torn")
        return None if self.frozen else CameraFrame(np.full((48, 64, 3), 7, np.uint8), time.monotonic())

    def close(self) -> None:
        self.closed = True


class Reusing(Steady):
    """A camera with one buffer for all frames, each brighter than the last."""

    buffer = np.zeros((48, 64, 3), np.uint8)

    def read(self, seconds: float) -> CameraFrame | None:
        time.sleep(0.005)
        self.buffer += 1
        return CameraFrame(self.buffer, time.monotonic())


class Absent(CameraDriver):
    """A camera that is not there."""

    def __init__(self, setup: CameraSetup) -> None:
        raise ValueError("no such device")

    def read(self, seconds: float) -> CameraFrame | None:
        return None


class Silent(Steady):
    """A camera that never gives a frame."""

    def read(self, seconds: float) -> CameraFrame | None:
        time.sleep(0.005)
        return None


class Pipeline:
    """A pipeline of librealsense with one camera, `322142001230`.

    Attributes:
        domain: the clock of its timestamps.
        stamp: the newest timestamp, in milliseconds.
    """

    domain = GLOBAL_TIME
    stamp = 0.0
    stopped = 0

    def start(self, config: Any) -> None:
        if config.serial not in (None, "322142001230"):
            raise RuntimeError("No device connected")
        self.size = config.stream[1:3]

    def try_wait_for_frames(self, milliseconds: int) -> tuple[bool, Any]:
        width, height = self.size
        picture = np.zeros((height, width, 3), np.uint8)
        picture[:, :, 0] = 200
        color = SimpleNamespace(
            get_data=lambda: picture,
            get_timestamp=lambda: type(self).stamp,
            get_frame_timestamp_domain=lambda: type(self).domain,
        )
        return True, SimpleNamespace(get_color_frame=lambda: color)

    def stop(self) -> None:
        type(self).stopped += 1


class Config:
    """A configuration of librealsense."""

    serial: str | None = None
    stream: tuple[Any, ...] = ()

    def enable_device(self, serial: str) -> None:
        self.serial = serial

    def enable_stream(self, *stream: Any) -> None:
        self.stream = stream


def install_realsense(monkeypatch: pytest.MonkeyPatch) -> type[Pipeline]:
    """Let `import pyrealsense2` give the fake; return its pipelines, new for each test."""
    pipeline = type("OwnPipeline", (Pipeline,), {})
    device = SimpleNamespace(get_info=lambda _: "322142001230")
    _install(
        monkeypatch,
        "pyrealsense2",
        pipeline=pipeline,
        config=Config,
        stream=SimpleNamespace(color="color"),
        format=SimpleNamespace(rgb8="rgb8"),
        camera_info=SimpleNamespace(serial_number="serial"),
        context=lambda: SimpleNamespace(query_devices=lambda: [device]),
        timestamp_domain=SimpleNamespace(
            system_time=SYSTEM_TIME, global_time=GLOBAL_TIME, hardware_clock=HARDWARE_CLOCK
        ),
    )
    return pipeline


def lacking(*names: str) -> Callable[[Iterable[str]], list[str]]:
    """Return a `missing_modules` of an interpreter that lacks some modules."""
    return lambda modules: [name for name in modules if name in names]


class Capture:
    """A device of V4L2 as OpenCV opens it.

    Attributes:
        reads: whether it gives pictures.
        stamp: seconds on the monotonic clock by which it says that its newest frame was taken; 0: it does not say.
        most: the largest width that it takes.
    """

    reads, stamp, most = True, 0.0, 1920
    made: list[Capture]

    def __init__(self, number: int, backend: int) -> None:
        self.number, self.released = number, False
        self.values: dict[int, float] = {}
        type(self).made.append(self)

    def isOpened(self) -> bool:  # noqa: N802 - its name in the library
        return self.number < 9

    def set(self, name: int, value: float) -> bool:
        self.values[name] = min(value, type(self).most)
        return True

    def get(self, name: int) -> float:
        return self.values.get(name, 1000 * type(self).stamp)

    def read(self) -> tuple[bool, Any]:
        picture = np.zeros((48, 64, 3), np.uint8)
        picture[:, :, 0] = 200  # blue comes first
        return type(self).reads, picture if type(self).reads else None

    def release(self) -> None:
        self.released = True


def install_opencv(monkeypatch: pytest.MonkeyPatch) -> type[Capture]:
    """Let `import cv2` give the fake; return its captures, new for each test."""
    capture = type("OwnCapture", (Capture,), {"made": []})
    names = ("CAP_V4L2", "CAP_PROP_FRAME_WIDTH", "CAP_PROP_FRAME_HEIGHT")
    extra = ("CAP_PROP_FPS", "CAP_PROP_BUFFERSIZE", "CAP_PROP_POS_MSEC")
    _install(monkeypatch, "cv2", VideoCapture=capture, **{name: i for i, name in enumerate((*names, *extra))})
    return capture


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
