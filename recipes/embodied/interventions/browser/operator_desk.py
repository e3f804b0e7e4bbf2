"""The operator who steers, and what they asked for since the last step. No sockets; moments are arguments."""

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
from recipes.embodied.interventions.operator_link import merged
from recipes.embodied.interventions.person import Controls


class DeskTakenError(Exception):
    """Somebody else steers, and their connection is alive."""


class OperatorDesk:
    """The place of one operator. Safe for threads.

    A second person is refused while the first is heard. Whoever comes after a silence replaces the first, whose link
    may be dead without a word.

    Args:
        alive_seconds: the seconds without a message after which an operator may be replaced.
    """

    def __init__(self, alive_seconds: float) -> None:
        self._alive_seconds = alive_seconds
        self._lock = threading.Lock()
        self._operator: object | None = None
        self._heard_at = 0.0
        self._pending: list[Controls] = []

    @property
    def operator(self) -> object | None:
        """The connection that steers; None: nobody is connected."""
        return self._operator

    def sit(self, person: object, now: float) -> object | None:
        """Make a person the operator; return whom they replace.

        Raises:
            DeskTakenError: somebody else steers.
        """
        with self._lock:
            if self._operator is not None and now - self._heard_at < self._alive_seconds:
                raise DeskTakenError
            replaced, self._operator, self._heard_at = self._operator, person, now
            return replaced

    def hear(self, person: object, controls: Controls, now: float) -> bool:
        """Take a message of a person into account; return whether they are the operator."""
        with self._lock:
            if person is not self._operator:
                return False
            self._heard_at = now
            pending = merged([*self._pending, controls])
            self._pending = [] if pending is None else [pending]
            return True

    def leave(self, person: object) -> None:
        """Free the place, if it is this person's. What they said before counts."""
        with self._lock:
            if person is self._operator:
                self._operator = None

    def take(self) -> tuple[Controls | None, bool]:
        """Return what the operator asked for since the last call, None if nothing came, and whether one is there."""
        with self._lock:
            pending, self._pending = self._pending, []
            return (pending[0] if pending else None), self._operator is not None


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
