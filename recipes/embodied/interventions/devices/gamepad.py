"""A gamepad, by its device file.

The left stick moves the hand forward and to the sides, the triggers up and down, the right stick turns it. The lower
button moves the gripper, the right shoulder button holds the arm, start and select judge the episode.
"""

from __future__ import annotations

from typing import Any, Final

from recipes.embodied.interventions.devices.event_device import EventDevice, InputEvent
from recipes.embodied.interventions.intervention import Axes, Steerable, Verdict
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.interventions.source_options import GamepadOptions

# Codes of linux/input-event-codes.h, as Linux names the controls of every gamepad it knows.
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
    """Return the motion along the axes and the turn about them that the controls of a gamepad stand for.

    Sticks count to the right and towards the person, from -1 to 1; triggers from 0 to 1.
    """
    return (-left_y, -left_x, right_trigger - left_trigger), (cross_x, -right_y, -right_x)


class GamepadState:
    """Positions of the controls, as events change them.

    Args:
        ranges: smallest and largest position of each axis, by code.
    """

    def __init__(self, ranges: dict[int, tuple[int, int]]) -> None:
        self._ranges = ranges
        self._axes = dict.fromkeys((*_STICKS, *_TRIGGERS), 0.0)
        self._held: set[int] = set()
        self._pressed: set[int] = set()

    def change(self, event: InputEvent) -> None:
        """Take an event into account."""
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
        """Return the state, and forget what was pressed."""
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
        """See `PersonSource`."""
        for event in self._device.read():
            self._state.change(event)
        return self._state.take()

    def close(self) -> None:
        """See `InterventionSource`."""
        self._device.close()
