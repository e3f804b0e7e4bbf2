"""Cameras that show a video or the pictures of a folder, again and again: to try a job without a camera."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.pictures import decoded, read_video
from recipes.embodied.cameras.camera import CameraDriver, CameraError, CameraFrame, CameraSetup

_PICTURES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


class RecordedCamera(CameraDriver):
    """Shows the frames of `path` at `fps`, in order, and begins anew at the end."""

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
        """See `CameraDriver`."""
        now = time.monotonic()
        if self._due - now > seconds:
            time.sleep(seconds)
            return None
        time.sleep(max(0.0, self._due - now))
        taken = time.monotonic()
        # A machine that was busy misses frames, as a camera does.
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
