"""A SpaceMouse of 3Dconnexion, by its HID reports; the package `hidapi` is imported here only.

Pushing and turning the cap moves and turns the hand, the left button moves the gripper, the right one holds the arm.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from recipes.embodied.interventions.devices.event_device import missing_package
from recipes.embodied.interventions.intervention import InterventionError, Steerable
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.interventions.source_options import SpaceMouseOptions

VENDOR: Final = 0x256F
# Older devices have the vendor of Logitech, and these products.
OLD_VENDOR: Final = 0x046D
OLD_PRODUCTS: Final = range(0xC603, 0xC62C)
FULL: Final = 350.0  # counts of the largest deflection
_REPORT_BYTES: Final = 64
_MOVES, _TURNS, _BUTTONS = 1, 2, 3  # numbers of reports
_LEFT, _RIGHT = 1, 2


class SpaceMouseState:
    """Position of the cap and the buttons, as reports change them."""

    def __init__(self) -> None:
        self._moves = self._turns = (0, 0, 0)
        self._buttons = self._pressed = 0

    def change(self, report: Sequence[int]) -> None:
        """Take a report into account; its first byte is its number.

        Newer devices put all six axes into report 1, older ones the turns into report 2.
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
        """Return the state, and forget what was pressed."""
        pressed, self._pressed = self._pressed, 0
        # The device counts to the right, towards the person, and down.
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
        """See `PersonSource`."""
        try:
            while report := self._device.read(_REPORT_BYTES):
                self._state.change(report)
        except (OSError, ValueError) as error:
            raise self._lost("the device disconnected", error) from error
        return self._state.take()

    def close(self) -> None:
        """See `InterventionSource`."""
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
        InterventionError: it does not exist, or there are several.
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
