"""Linux devices for steering by a person: device files by `evdev`, gamepads, and a SpaceMouse by `hid`."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from recipes.embodied.config.intervention_types import GamepadOptions, SpaceMouseOptions
from recipes.embodied.interventions.intervention import Axes, InterventionError, Steerable, Verdict
from recipes.embodied.interventions.person import Controls, PersonSource
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
        is_key: whether a key or button changed, rather than an axis.
        code: the code of the key, button or axis.
        value: 0 up, 1 down, 2 repeated; for an axis its raw position.
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
        """Return the smallest and the largest position of an axis; 0 and 0 if the device lacks it."""
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


# Codes of linux/input-event-codes.h for the controls of every gamepad that Linux knows.
LEFT_X, LEFT_Y, LEFT_TRIGGER, RIGHT_X, RIGHT_Y, RIGHT_TRIGGER, HAT_X = 0, 1, 2, 3, 4, 5, 16
SOUTH, RIGHT_SHOULDER, SELECT, START = 0x130, 0x137, 0x13A, 0x13B
_STICKS: Final = (LEFT_X, LEFT_Y, RIGHT_X, RIGHT_Y, HAT_X)
_TRIGGERS: Final = (LEFT_TRIGGER, RIGHT_TRIGGER)


def pad_axes(
    left_x: float,
    left_y: float,
    right_x: float,
    right_y: float,
    left_trigger: float,
    right_trigger: float,
    cross_x: float,
) -> tuple[Axes, Axes]:
    """Return the motion along and the rotation about the axes for the controls of a gamepad.

    Stick values increase to the right and towards the person, from -1 to 1; triggers are from 0 to 1.
    """
    return (-left_y, -left_x, right_trigger - left_trigger), (cross_x, -right_y, -right_x)


class GamepadState:
    """Positions of the controls, updated by events.

    Args:
        ranges: smallest and largest position of each axis, by code.
    """

    def __init__(self, ranges: dict[int, tuple[int, int]]) -> None:
        self._ranges = ranges
        self._axes = dict.fromkeys((*_STICKS, *_TRIGGERS), 0.0)
        self._held: set[int] = set()
        self._pressed: set[int] = set()

    def change(self, event: InputEvent) -> None:
        """Apply an event."""
        if event.is_key:
            if event.value == 1:
                self._pressed.add(event.code)
                self._held.add(event.code)
            elif event.value == 0:
                self._held.discard(event.code)
            return
        low, high = self._ranges.get(event.code, (0, 0))
        if event.code in self._axes and high > low:
            share = (event.value - low) / (high - low)
            self._axes[event.code] = share if event.code in _TRIGGERS else 2 * share - 1

    def take(self) -> Controls:
        """Return the state, and clear the pressed buttons."""
        axes, pressed = self._axes, self._pressed
        self._pressed = set()
        verdict: Verdict | None = "success" if START in pressed else "failure" if SELECT in pressed else None
        order = (LEFT_X, LEFT_Y, RIGHT_X, RIGHT_Y, LEFT_TRIGGER, RIGHT_TRIGGER, HAT_X)
        return Controls(
            *pad_axes(*(axes[code] for code in order)),
            engaged=RIGHT_SHOULDER in self._held | pressed,
            toggles_gripper=SOUTH in pressed,
            verdict=verdict,
        )


class GamepadSource(PersonSource):
    """A gamepad that is attached to the node of the env worker."""

    options_model = GamepadOptions

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        self._device = EventDevice("gamepad", options.device)
        self._state = GamepadState({axis: self._device.axis_range(axis) for axis in (*_STICKS, *_TRIGGERS)})

    def poll(self) -> Controls:
        for event in self._device.read():
            self._state.change(event)
        return self._state.take()

    def close(self) -> None:
        self._device.close()


VENDOR: Final = 0x256F
# Older devices have Logitech's vendor id, and these product ids.
OLD_VENDOR: Final = 0x046D
OLD_PRODUCTS: Final = range(0xC603, 0xC62C)
FULL: Final = 350.0  # counts at the largest deflection
_REPORT_BYTES: Final = 64
_MOVES, _TURNS, _BUTTONS = 1, 2, 3  # numbers of reports
_LEFT, _RIGHT = 1, 2


class SpaceMouseState:
    """Positions of the cap and the buttons, updated by reports."""

    def __init__(self) -> None:
        self._moves = self._turns = (0, 0, 0)
        self._buttons = self._pressed = 0

    def change(self, report: Sequence[int]) -> None:
        """Apply a report; its first byte is its number.

        Newer devices report all six axes in report 1; older ones report rotations in report 2.
        """
        if not report:
            return
        number, data = report[0], bytes(report[1:])
        if number == _MOVES and len(data) >= 6:
            self._moves = struct.unpack_from("<3h", data)
            if len(data) >= 12:
                self._turns = struct.unpack_from("<3h", data, 6)
        elif number == _TURNS and len(data) >= 6:
            self._turns = struct.unpack_from("<3h", data)
        elif number == _BUTTONS and data:
            self._pressed |= data[0] & ~self._buttons
            self._buttons = data[0]

    def take(self) -> Controls:
        """Return the state, and clear the pressed buttons."""
        pressed, self._pressed = self._pressed, 0
        # The device counts positively to the right, towards the person, and down.
        right, back, down = (count / FULL for count in self._moves)
        about_right, about_back, about_down = (count / FULL for count in self._turns)
        return Controls(
            (-back, -right, -down),
            (-about_back, -about_right, -about_down),
            engaged=bool((self._buttons | pressed) & _RIGHT),
            toggles_gripper=bool(pressed & _LEFT),
        )


class SpaceMouseSource(PersonSource):
    """A SpaceMouse that is attached to the node of the env worker."""

    options_model = SpaceMouseOptions

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        try:
            hid: Any = import_module("hid")
        except ImportError as error:
            raise missing_package("spacemouse", "hidapi") from error
        self._state = SpaceMouseState()
        device = _found(hid, options.serial)
        self._where = f"spacemouse {device.get('serial_number') or device.get('product_string') or ''}".rstrip()
        self._device: Any = hid.device()
        try:
            self._device.open_path(device["path"])
            self._device.set_nonblocking(1)
        except OSError as error:
            raise self._lost("the device cannot be opened", error) from error

    def poll(self) -> Controls:
        try:
            while report := self._device.read(_REPORT_BYTES):
                self._state.change(report)
        except (OSError, ValueError) as error:
            raise self._lost("the device disconnected", error) from error
        return self._state.take()

    def close(self) -> None:
        self._device.close()

    def _lost(self, message: str, error: Exception) -> InterventionError:
        return InterventionError(
            message,
            where=self._where,
            why=str(error) or None,
            help="plug it in, and give this user read access to `/dev/hidraw*` (a udev rule for vendor 256f)",
        )


def _found(hid: Any, serial: str | None) -> dict[str, Any]:
    """Return the library's description of the selected device.

    Raises:
        InterventionError: there is no such device, or several.
    """
    devices: dict[Any, dict[str, Any]] = {}
    for info in hid.enumerate():
        old = info["vendor_id"] == OLD_VENDOR and info["product_id"] in OLD_PRODUCTS
        if (old or info["vendor_id"] == VENDOR) and serial in (None, info.get("serial_number")):
            devices[info["path"]] = info
    if len(devices) != 1:
        listed = ", ".join(str(device.get("serial_number") or device["path"]) for device in devices.values())
        raise InterventionError(
            f"there are {len(devices)} SpaceMouse devices" if devices else "no SpaceMouse was detected",
            where="spacemouse",
            why=listed or None,
            help="plug one in and give this user read access to `/dev/hidraw*` (a udev rule for vendor 256f)"
            + (", or name one by `options: {serial: ...}`" if devices else ""),
        )
    return next(iter(devices.values()))
