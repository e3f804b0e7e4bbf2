"""The keys of a keyboard, the same for a terminal and for a device file."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from recipes.embodied.interventions.intervention import Axes, Verdict
from recipes.embodied.interventions.person import Controls

# Direction of each key: forward, left, up, and about these.
MOVES: Final = {
    "w": (1, 0, 0, 0, 0, 0),
    "s": (-1, 0, 0, 0, 0, 0),
    "a": (0, 1, 0, 0, 0, 0),
    "d": (0, -1, 0, 0, 0, 0),
    "r": (0, 0, 1, 0, 0, 0),
    "f": (0, 0, -1, 0, 0, 0),
    "o": (0, 0, 0, 1, 0, 0),
    "u": (0, 0, 0, -1, 0, 0),
    "k": (0, 0, 0, 0, 1, 0),
    "i": (0, 0, 0, 0, -1, 0),
    "j": (0, 0, 0, 0, 0, 1),
    "l": (0, 0, 0, 0, 0, -1),
}
GRIPPER: Final = "space"
HOLD: Final = "tab"
SUCCESS: Final = "enter"
FAILURE: Final = "backspace"
DISCARD: Final = "x"
REWARD: Final = "e"
_VERDICTS: Final[dict[str, Verdict]] = {SUCCESS: "success", FAILURE: "failure", DISCARD: "discard"}
LEGEND: Final = (
    "w/s forward and back, a/d left and right, r/f up and down, u/o, i/k, j/l turn, space gripper, tab hold,"
    " enter success, backspace failure, x discard, e reward"
)


def key_axes(keys: Set[str]) -> tuple[Axes, Axes]:
    """Return the motion along the axes and the turn about them that keys stand for."""
    sums = [0.0] * 6
    for key in keys:
        for axis, share in enumerate(MOVES.get(key, ())):
            sums[axis] += share
    x, y, z, roll, pitch, yaw = sums
    return (x, y, z), (roll, pitch, yaw)


def controls_of(held: Set[str], pressed: Set[str]) -> Controls:
    """Return what keys stand for.

    Args:
        held: keys that are down.
        pressed: keys that went down since the last look.
    """
    linear, angular = key_axes(held | pressed)
    return Controls(
        linear,
        angular,
        engaged=HOLD in held | pressed,
        toggles_gripper=GRIPPER in pressed,
        verdict=next((verdict for key, verdict in _VERDICTS.items() if key in pressed), None),
        rewards=REWARD in pressed,
    )
