"""The view of an operator: the newest pictures and the state of the episode, from the thread of the environment."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.embodied.cameras.camera import CameraView

# Milliseconds are lost by larger ones, and the page shows them smaller.
_LARGEST: Final = 640


class Shown(NamedTuple):
    """The view at one moment.

    Attributes:
        number: grows with each set of pictures.
        views: the newest picture of each camera.
        state: the state of the episode, as it is sent.
    """

    number: int = 0
    views: tuple[CameraView, ...] = ()
    state: dict[str, Any] = {}  # noqa: RUF012 - a tuple's default, never changed


class Exhibit:
    """The newest pictures and state. Safe for threads.

    Args:
        wake: called after each change.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._shown = Shown()

    @property
    def newest(self) -> Shown:
        """The newest view."""
        return self._shown

    def show(self, views: Sequence[CameraView]) -> None:
        """Replace the pictures."""
        with self._lock:
            self._shown = self._shown._replace(number=self._shown.number + 1, views=tuple(views))
        self._wake()

    def tell(self, state: dict[str, Any]) -> None:
        """Replace the state of the episode."""
        with self._lock:
            changed, self._shown = state != self._shown.state, self._shown._replace(state=state)
        if changed:
            self._wake()


def jpeg(image: NDArray[np.uint8], quality: int) -> bytes:
    """Return an image [H, W, 3] as JPEG, made smaller where a side is longer than 640 pixels."""
    picture = Image.fromarray(image)
    picture.thumbnail((_LARGEST, _LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def age_of(view: CameraView) -> float:
    """Return the seconds since a picture was taken."""
    return max(0.0, time.monotonic() - view.taken)
