"""The cameras of one robot, opened, observed and closed together; each has a thread that keeps its newest frame."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.drivers import ArmScene, CameraDriver, CameraError, CameraFrame, CameraSetup, CameraView
from recipes.embodied.config.camera_config import CAMERA_SOURCES, CameraOptions, RobotEnvOptions
from rlinf_core import ConfigError, RobotUnit
from rlinf_core.process.requirements import missing_modules
from rlinf_core.registry import Registry

# The time limit for the first frame of every camera.
FIRST_FRAME_SECONDS: Final = 10.0
_SOURCES: Registry[type[CameraDriver]] = Registry(
    "camera source",
    {name: source.target for name, source in CAMERA_SOURCES.items()},
    bases=("recipes.embodied.cameras.drivers:CameraDriver",),
)
register_camera = _SOURCES.register


# The longest wait of one `read`, after which the reader checks whether it should end.
_READ_SECONDS: Final = 0.2
_CLOSE_SECONDS: Final = 5.0
_CORRECT: Final = "correct `read` of its driver"
_LOOK: Final = "check its cable, and that nothing else uses it; then start again"


class CameraReader:
    """Reads one camera, and keeps its newest frame. Thread-safe, but an `on_demand` camera is read by its only user.

    Args:
        driver: the class of the camera.
        setup: the camera's description.
        where: the robot, for errors.

    Attributes:
        count: the number of frames so far.
    """

    def __init__(self, driver: type[CameraDriver], setup: CameraSetup, where: str) -> None:
        self.setup, self.count = setup, 0
        self._driver, self._where = driver, where
        self._newest: CameraFrame | None = None
        self._fault: BaseException | None = None
        self._begun = time.monotonic()
        self._ready, self._closing = threading.Event(), threading.Event()
        self._camera = self._opened(driver) if driver.on_demand else None
        self._thread: threading.Thread | None = None
        if self._camera is None:
            self._thread = threading.Thread(target=self._read, name=f"rlinf-camera-{setup.name}", daemon=True)
            self._thread.start()

    def wait(self, deadline: float) -> None:
        """Wait for the first frame, until `deadline` on `time.monotonic`.

        Raises:
            CameraError: no frame has come.
        """
        if self._camera is None and not self._ready.wait(max(0.0, deadline - time.monotonic())):
            raise self._error(f"has given no frame within {time.monotonic() - self._begun:.1f} s")
        self.newest()

    def newest(self) -> CameraFrame:
        """Return the newest frame, however old.

        Raises:
            CameraError: the camera has failed, or has taken no frame yet.
        """
        if self._camera is not None:
            self._take(self._camera)
        fault = self._fault
        if fault is not None:
            if isinstance(fault, CameraError):
                fault.where = fault.where or self._where
                raise fault
            raise self._error("has failed", f"{type(fault).__name__}: {fault}") from fault
        if self._newest is None:
            raise self._error("has given no frame yet")
        self._check(self._newest)
        return self._newest

    def _check(self, frame: CameraFrame) -> None:
        """Refuse a frame of another shape, or without all of `crop`, or with a capture time that is not on
        `time.monotonic`.

        Raises:
            CameraError: the frame is invalid.
        """
        if not isinstance(cast("object", frame), CameraFrame):
            raise self._error(f"gives {type(frame).__name__} and no `CameraFrame`", help=_CORRECT)
        image = np.asarray(frame.image)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            gives = f"gives {image.dtype}{list(image.shape)}; pictures are RGB, uint8 [H, W, 3]"
            raise self._error(gives, help=_CORRECT)
        crop, (height, width, _) = self.setup.options.crop, image.shape
        if crop is not None and (crop[2] > width or crop[3] > height):
            raise self._error(
                f"gives pictures of {width}x{height}, beyond which `crop: {list(crop)}` reaches",
                help="correct `crop`, or `capture` where the camera gives other sizes",
            )
        ahead = frame.taken - time.monotonic()
        if ahead > self.setup.options.max_age:
            late = f"gives frames that will be taken in {ahead:.0f} s: a frozen one could not be told"
            raise self._error(late, help="let `read` of its driver return `time.monotonic()` as `taken`")

    def fresh(self) -> CameraFrame:
        """Return the newest frame, if it is not older than `max_age`.

        Raises:
            CameraError: the frame is older, or the camera has failed.
        """
        frame = self.newest()
        age, most = time.monotonic() - frame.taken, self.setup.options.max_age
        if age > most:
            raise self._error(f"has taken no frame for {age:.1f} s; at most {most:g} s are allowed")
        return frame

    def rate(self) -> float:
        """Return the frames per second so far."""
        return self.count / max(time.monotonic() - self._begun, 1e-9)

    def close(self) -> None:
        """End the thread and release the camera. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        elif self._camera is not None:
            self._camera.close()

    def _opened(self, driver: type[CameraDriver]) -> CameraDriver:
        try:
            return driver(self.setup)
        except CameraError as error:
            error.where = error.where or self._where
            raise

    def _read(self) -> None:
        camera: CameraDriver | None = None
        try:
            camera = self._driver(self.setup)
            while not self._closing.is_set():
                if self._take(camera):
                    self._ready.set()
        except BaseException as error:  # noqa: BLE001 - whatever a driver raises is raised where frames are taken
            self._fault = error
        finally:
            self._ready.set()
            if camera is not None:
                camera.close()

    def _take(self, camera: CameraDriver) -> bool:
        """Keep the next frame of a camera, with an image of its own: a driver may use one buffer for all of them.

        Returns:
            Whether there was one in time.
        """
        frame = camera.read(_READ_SECONDS)
        if frame is None:
            return False
        is_frame = isinstance(cast("object", frame), CameraFrame)  # anything else is refused where frames are taken
        self._newest = frame._replace(image=np.array(frame.image)) if is_frame else frame
        self.count += 1
        return True

    def _error(self, what: str, why: str | None = None, help: str = _LOOK) -> CameraError:
        serial = f" ({self.setup.serial})" if self.setup.serial else ""
        return CameraError(
            f"camera `{self.setup.name}`{serial} {what}",
            where=self._where,
            why=why,
            help=help,
        )


class CameraState(NamedTuple):
    """The current state of one camera.

    Attributes:
        name: its name in the observation.
        source: its driver.
        serial: serial number or path of the device, if it has one.
        size: width and height of its frames, in pixels.
        rate: frames per second.
        age: age of the newest frame, in seconds.
    """

    name: str
    source: str
    serial: str | None
    size: tuple[int, int]
    rate: float
    age: float


class CameraSet:
    """The open cameras of a robot. Used by one thread.

    Args:
        options: the cameras in the job file.
        robot: the robot's entry, for its `camera_serials` and `camera_type`.
        where: the robot and its address, for errors.
        scene: returns the current scene for rendered views; None: the robot has no scene.

    Attributes:
        ages: the ages of the frames at the last `observe`, by camera, in seconds; NaN before the first.

    Raises:
        ConfigError: a package is missing, or a camera has no serial number or no driver.
        CameraError: a camera does not exist, or sends no frame.
    """

    def __init__(
        self, options: RobotEnvOptions, robot: RobotUnit, where: str, scene: Callable[[], ArmScene] | None = None
    ) -> None:
        self.options, self._where = options, where
        self._type = str(getattr(robot, "camera_type", "realsense"))
        self.serials = options.serials(tuple(getattr(robot, "camera_serials", ())))
        self._kept: dict[str, tuple[CameraFrame, NDArray[np.uint8]]] = {}
        self._ages: dict[str, tuple[float, int]] = {}
        self.ages = dict.fromkeys(options.cameras, math.nan)
        makes = [self._driver(name, scene) for name in options.cameras]
        self._readers: list[CameraReader] = []
        try:
            for make, (name, camera) in zip(makes, options.cameras.items(), strict=True):
                setup = CameraSetup(name, camera, self.serials[name], scene)
                self._readers.append(CameraReader(make, setup, where))
            deadline = time.monotonic() + FIRST_FRAME_SECONDS
            for reader in self._readers:
                reader.wait(deadline)
        except BaseException:
            self.close()
            raise

    def observe(self) -> dict[str, NDArray[np.uint8]]:
        """Return the newest frame of each camera by name, uint8 [H, W, 3], in the size of the observation.

        Raises:
            CameraError: a frame is older than its `max_age`, or a camera has failed.
        """
        observed: dict[str, NDArray[np.uint8]] = {}
        for reader in self._readers:
            name, frame = reader.setup.name, reader.fresh()
            kept = self._kept.get(name)
            if kept is None or kept[0] is not frame:
                self._kept[name] = kept = (frame, fitted(frame.image, reader.setup.options))
            observed[name] = kept[1]
            total, count = self._ages.get(name, (0.0, 0))
            self.ages[name] = time.monotonic() - frame.taken
            self._ages[name] = (total + self.ages[name], count + 1)
        return observed

    def watch(self) -> None:
        """Check that every camera has a recent frame.

        Raises:
            CameraError: a camera has none, or has failed.
        """
        for reader in self._readers:
            reader.fresh()

    def views(self) -> list[CameraView]:
        """Return the newest images as captured, however old, for a person."""
        frames = [(reader.setup.name, reader.newest()) for reader in self._readers]
        return [CameraView(name, frame.image, frame.taken) for name, frame in frames]

    def states(self) -> list[CameraState]:
        """Return the current states of the cameras.

        Raises:
            CameraError: a camera has failed.
        """
        states: list[CameraState] = []
        for reader in self._readers:
            setup, frame = reader.setup, reader.newest()
            height, width = frame.image.shape[:2]
            age = max(0.0, time.monotonic() - frame.taken)
            source = setup.options.source_on(self._type)
            rate = setup.options.fps if source == "scene" else reader.rate()
            states.append(
                CameraState(setup.name, source, setup.serial or setup.options.path, (width, height), rate, age)
            )
        return states

    def frame_ages(self) -> dict[str, NDArray[np.float32]]:
        """Return `ages` as float32 [1]."""
        return {name: np.array([age], np.float32) for name, age in self.ages.items()}

    def take_ages(self) -> dict[str, tuple[float, int]]:
        """Return the summed ages, in seconds, of frames observed since the last call, and their number, by camera."""
        ages, self._ages = self._ages, {}
        return ages

    def close(self) -> None:
        """Release all cameras. Idempotent."""
        for reader in self._readers:
            reader.close()

    def _driver(self, name: str, scene: Callable[[], ArmScene] | None) -> type[CameraDriver]:
        """Return the driver of a camera, after checking that its packages are installed."""
        camera = self.options.cameras[name]
        source = camera.source_on(self._type)
        at = f"options.cameras.{name}"
        for module, install in camera.modules(self._type):
            if missing_modules([module]):
                raise ConfigError(
                    f"`source: {source}` needs the package `{module}`, which `{sys.executable}` does not have",
                    where=f"{at}, {self._where}",
                    help=f"run `{sys.executable} -m pip install '{install}'` on the node of the camera",
                )
        if source not in CAMERA_SOURCES and ":" not in source and source not in _SOURCES.names():
            raise ConfigError(
                f"there is no driver for cameras of `camera_type: {source}`",
                where=f"{at}, {self._where}",
                help="name your subclass of `CameraDriver`: `source: package.module:Class`",
            )
        if camera.takes_serial and self.serials[name] is None:
            raise ConfigError(
                f"the camera `{name}` has no serial number",
                where=f"{at}, {self._where}",
                help="add one to the robot's `camera_serials`, which its cameras take in order",
            )
        if source == "scene" and scene is None:
            raise ConfigError(
                "`source: scene` shows a Franka arm, which this robot is not",
                where=f"{at}, {self._where}",
                help="name another source",
            )
        try:
            return _SOURCES.get(source)
        except ConfigError as error:
            error.where = at
            raise


Box = tuple[int, int, int, int]


def fitted(image: NDArray[np.uint8], options: CameraOptions) -> NDArray[np.uint8]:
    """Return an image [H, W, 3] in the size of the observation, without distortion unless `crop` is given.

    Every pixel is the mean of the pixels that it covers, as a camera's own would be.
    """
    height, width = image.shape[:2]
    box = options.crop or middle(height, width, options.height, options.width)
    if box == (0, 0, width, height) and (height, width) == (options.height, options.width):
        return image
    from PIL import Image

    picture = Image.fromarray(image)
    return np.array(picture.resize((options.width, options.height), Image.Resampling.BOX, box))


def middle(height: int, width: int, wanted_height: int, wanted_width: int) -> Box:
    """Return the largest centered box of an image that has the aspect ratio of another size."""
    share = min(width / wanted_width, height / wanted_height)
    wide, high = min(width, round(share * wanted_width)), min(height, round(share * wanted_height))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high
