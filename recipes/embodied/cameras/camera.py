"""The interface of cameras. numpy only, no vendor's package.

A camera of your own is a subclass of `CameraDriver` with one method, `read`; `source: package.module:Class` names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.camera_config import CameraOptions
from rlinf_core.errors import RuntimeFailure

# A buffer is not older than this, in seconds; a greater age is one of another clock.
_OLDEST: Final = 2.0


def taken_at(device_time: float, arrived: float) -> float:
    """Return when a frame was taken, on `time.monotonic`.

    Args:
        device_time: the time by the device's clock.
        arrived: the arrival time of the frame, used where the device's time is later, or far earlier.
    """
    return device_time if arrived - _OLDEST <= device_time <= arrived else arrived


class CameraError(RuntimeFailure):
    """A camera does not exist, or has taken no frame for too long; `where` is the robot and its address."""

    def after_stop(self) -> CameraError:
        """Return the same error, of a robot that was stopped because of it."""
        return CameraError(f"{self.message}, so the robot was stopped", where=self.where, why=self.why, help=self.help)


class CameraFrame(NamedTuple):
    """A picture and its moment.

    Attributes:
        image: uint8 [H, W, 3], RGB, upright.
        taken: when, on `time.monotonic`, which is the clock of states, too.
    """

    image: NDArray[np.uint8]
    taken: float


class CameraView(NamedTuple):
    """A picture that a person is shown.

    Attributes:
        camera: its name.
        image: uint8 [H, W, 3], RGB, upright.
        taken: when, on `time.monotonic`.
    """

    camera: str
    image: NDArray[np.uint8]
    taken: float


class ArmScene(NamedTuple):
    """The arm and the point to reach, as far as they are known, for rendered views.

    Attributes:
        joints: [7], measured, in radians.
        target: [3], the point to reach, in metres; None: there is none.
        measured: when, on `time.monotonic`.
    """

    joints: NDArray[np.float64]
    target: NDArray[np.float64] | None
    measured: float


class CameraSetup(NamedTuple):
    """The description of one camera for its driver.

    Attributes:
        name: its name in the observation.
        options: its entry in the file.
        serial: serial number of the device; None: it has none.
        scene: what a rendered view shows now; None: the robot has no scene.
    """

    name: str
    options: CameraOptions
    serial: str | None = None
    scene: Callable[[], ArmScene] | None = None


class CameraDriver(ABC):
    """A connection to one camera, made, read and closed by one thread.

    Args:
        setup: the camera's description.

    Attributes:
        on_demand: whether `read` shows the present moment at once, as a renderer does. It is then called when somebody
            looks; else a thread calls it again and again.

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
            None where none has come within `seconds`.

        Raises:
            CameraError: the device is gone.
        """

    def close(self) -> None:  # noqa: B027 - some have nothing to give back
        """Release the device. Idempotent."""
