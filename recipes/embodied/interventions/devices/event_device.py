"""Device files of keyboards and gamepads on Linux, read by the package `evdev`, which is imported here only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final, NamedTuple

from recipes.embodied.interventions.intervention import InterventionError
from rlinf_core import ConfigError


def missing_package(source: str, package: str) -> ConfigError:
    """Return the error about a missing device package in this interpreter."""
    return ConfigError(
        f"`source: {source}` needs the package `{package}`, which `{sys.executable}` does not have",
        help=f"run `{sys.executable} -m pip install {package}` on the node that the device is attached to",
    )


_KEY, _AXIS = 1, 3  # types of events, of linux/input-event-codes.h
_GAMEPAD_BUTTON: Final = 0x130  # BTN_SOUTH, which every gamepad has


class InputEvent(NamedTuple):
    """One change of a key, a button or an axis.

    Attributes:
        is_key: whether it is of a key or a button; else it is of an axis.
        code: which one.
        value: 0 up, 1 down, 2 repeated; of an axis its position, as the device counts.
    """

    is_key: bool
    code: int
    value: int


class EventDevice:
    """A device file.

    Args:
        source: name of the source, for errors.
        path: the path of the file; None: the only gamepad.

    Raises:
        ConfigError: `evdev` is not installed.
        InterventionError: there is no such device, or it cannot be read.
    """

    def __init__(self, source: str, path: str | None) -> None:
        try:
            self._evdev: Any = import_module("evdev")
        except ImportError as error:
            raise missing_package(source, "evdev") from error
        self._source = source
        self._path = path or self._only_gamepad()
        try:
            self._device: Any = self._evdev.InputDevice(self._path)
        except OSError as error:
            raise self._lost("the device cannot be opened", error) from error

    def _only_gamepad(self) -> str:
        gamepads: list[str] = []
        for path in self._evdev.list_devices():
            try:
                keys = self._evdev.InputDevice(path).capabilities().get(_KEY, ())
            except OSError:
                continue
            if _GAMEPAD_BUTTON in keys:
                gamepads.append(str(path))
        if len(gamepads) != 1:
            raise InterventionError(
                f"there are {len(gamepads)} gamepads" if gamepads else "no gamepad was detected",
                where=self._source,
                why=", ".join(gamepads) or None,
                help="plug one in and give this user read access to `/dev/input` (group `input`), or name one by"
                " `options: {device: /dev/input/...}`",
            )
        return gamepads[0]

    def axis_range(self, axis: int) -> tuple[int, int]:
        """Return the smallest and the largest position of an axis; 0 and 0 where the device has none."""
        try:
            info = self._device.absinfo(axis)
        except (OSError, KeyError):
            return 0, 0
        return int(info.min), int(info.max)

    def read(self) -> Iterator[InputEvent]:
        """Return the events since the last call, without waiting.

        Raises:
            InterventionError: the device was unplugged.
        """
        while True:
            try:
                event = self._device.read_one()
            except OSError as error:
                raise self._lost("the device disconnected", error) from error
            if event is None:
                return
            if event.type in (_KEY, _AXIS):
                yield InputEvent(event.type == _KEY, int(event.code), int(event.value))

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._device.close()

    def _lost(self, message: str, error: OSError) -> InterventionError:
        return InterventionError(
            message,
            where=f"{self._source} {self._path}",
            why=error.strerror or str(error),
            help="plug it in, and give this user read access to it (group `input`)",
        )
