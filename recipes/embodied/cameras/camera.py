"""The interface of cameras. Imports numpy but no vendor package.

A custom camera is a subclass of `CameraDriver` with one method, `read`; `source: package.module:Class` names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
