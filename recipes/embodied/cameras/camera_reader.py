"""The newest frame of one camera, kept by its own thread."""

from __future__ import annotations

import threading
import time
from typing import Final

from recipes.embodied.cameras.camera import CameraDriver, CameraError, CameraFrame, CameraSetup

# Seconds that one `read` may take, after which the reader looks whether it is to end.
_READ_SECONDS: Final = 0.2
_CLOSE_SECONDS: Final = 5.0


class CameraReader:
    """Reads one camera, and keeps its newest frame. Safe for threads; a camera `on_demand` is read by its one user.

    Args:
        driver: the class of the camera.
        setup: the camera's description.
        where: the robot, for errors.

    Attributes:
        count: frames so far.
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
            CameraError: none has come.
        """
        if self._camera is None and not self._ready.wait(max(0.0, deadline - time.monotonic())):
            raise self._error(f"has given no frame within {time.monotonic() - self._begun:.1f} s")
        self.newest()

    def newest(self) -> CameraFrame:
        """Return the newest frame, however old.

        Raises:
            CameraError: the camera has failed, or there was no frame yet.
        """
        if self._camera is not None:
            frame = self._camera.read(_READ_SECONDS)
            self._newest, self.count = frame or self._newest, self.count + (frame is not None)
        fault = self._fault
        if fault is not None:
            if isinstance(fault, CameraError):
                fault.where = fault.where or self._where
                raise fault
            raise self._error("has failed", f"{type(fault).__name__}: {fault}") from fault
        if self._newest is None:
            raise self._error("has given no frame yet")
        return self._newest

    def fresh(self) -> CameraFrame:
        """Return the newest frame, if it is not older than `max_age`.

        Raises:
            CameraError: it is, or the camera has failed.
        """
        frame = self.newest()
        age, most = time.monotonic() - frame.taken, self.setup.options.max_age
        if age > most:
            raise self._error(f"has taken no frame for {age:.1f} s; at most {most:g} s are allowed")
        return frame

    def rate(self) -> float:
        """Return the frames in a second so far."""
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
                frame = camera.read(_READ_SECONDS)
                if frame is not None:
                    self._newest = frame
                    self.count += 1
                    self._ready.set()
        except BaseException as error:  # noqa: BLE001 - whatever a driver raises is raised where frames are taken
            self._fault = error
        finally:
            self._ready.set()
            if camera is not None:
                camera.close()

    def _error(self, what: str, why: str | None = None) -> CameraError:
        serial = f" ({self.setup.serial})" if self.setup.serial else ""
        return CameraError(
            f"camera `{self.setup.name}`{serial} {what}",
            where=self._where,
            why=why,
            help="check its cable, and that nothing else uses it; then start again",
        )
