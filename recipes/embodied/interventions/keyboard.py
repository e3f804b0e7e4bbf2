"""A keyboard: that of the terminal, or the device file of a keyboard attached to the node."""

from __future__ import annotations

import os
import select
from collections.abc import Set
from typing import Any, Final

from recipes.embodied.config.intervention_types import KeyboardOptions
from recipes.embodied.interventions.event_device import EventDevice
from recipes.embodied.interventions.intervention import Axes, InterventionError, Steerable, Verdict
from recipes.embodied.interventions.person import Controls, PersonSource

# The direction of each key: forward, left, up, and rotations about these axes.
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
    """Return the motion along and the rotation about the axes for held keys."""
    sums = [0.0] * 6
    for key in keys:
        for axis, share in enumerate(MOVES.get(key, ())):
            sums[axis] += share
    x, y, z, roll, pitch, yaw = sums
    return (x, y, z), (roll, pitch, yaw)


def controls_of(held: Set[str], pressed: Set[str]) -> Controls:
    """Return the controls for keys.

    Args:
        held: keys that are down.
        pressed: keys that went down since the last call.
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


# Codes of linux/input-event-codes.h.
_LETTERS: Final = {17: "w", 31: "s", 30: "a", 32: "d", 19: "r", 33: "f"}
_TURNS: Final = {24: "o", 22: "u", 37: "k", 23: "i", 36: "j", 38: "l"}
CODES: Final = {**_LETTERS, **_TURNS, 57: GRIPPER, 15: HOLD, 28: SUCCESS, 14: FAILURE, 45: DISCARD, 18: REWARD}
CHARACTERS: Final = {
    **{letter: letter for letter in MOVES},
    " ": GRIPPER,
    "\t": HOLD,
    "\r": SUCCESS,
    "\n": SUCCESS,
    "\x7f": FAILURE,
    "\b": FAILURE,
    DISCARD: DISCARD,
    REWARD: REWARD,
}
_TERMINAL: Final = "/dev/tty"


class Terminal:
    """The keys of the process's terminal. A terminal reports no releases, so that a key counts for one step each time
    it is typed or repeats.

    Args:
        path: its device file.

    Raises:
        InterventionError: there is no terminal.
    """

    def __init__(self, path: str = _TERMINAL) -> None:
        import termios
        import tty

        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOCTTY)
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        except (OSError, termios.error) as error:
            raise InterventionError(
                "there is no terminal to read keys from",
                where="keyboard",
                why=str(error),
                help="workers of a run have none: name the keyboard's device file with `options: {device:"
                " /dev/input/...}`, or write `source: browser` and steer from its page",
            ) from error

    def read(self) -> set[str]:
        """Return the keys typed since the last call.

        Raises:
            InterventionError: the terminal has been closed.
        """
        keys: set[str] = set()
        while select.select([self._file], [], [], 0)[0]:
            try:
                typed = os.read(self._file, 64)
            except OSError:
                typed = b""
            if not typed:
                raise InterventionError(
                    "the terminal was closed", where="keyboard", help="start again from a terminal that stays open"
                )
            keys |= {CHARACTERS[letter] for letter in typed.decode("latin-1").lower() if letter in CHARACTERS}
        return keys

    def close(self) -> None:
        """Restore the terminal settings. Idempotent."""
        import termios

        if self._file >= 0:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
            os.close(self._file)
            self._file = -1


class KeyboardSource(PersonSource):
    """Keys move the hand, see `LEGEND`."""

    options_model = KeyboardOptions

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        self._terminal = None if options.device else Terminal()
        self._events = EventDevice("keyboard", options.device) if options.device else None
        self._held: set[str] = set()

    def poll(self) -> Controls:
        if self._terminal is not None:
            typed = self._terminal.read()
            return controls_of(set(), typed)
        pressed: set[str] = set()
        for event in self._events.read() if self._events is not None else ():
            key = CODES.get(event.code) if event.is_key else None
            if key is None:
                continue
            if event.value == 0:
                self._held.discard(key)
            else:
                pressed |= {key} if event.value == 1 else set()
                self._held.add(key)
        return controls_of(self._held, pressed)

    def close(self) -> None:
        for device in (self._terminal, self._events):
            if device is not None:
                device.close()
