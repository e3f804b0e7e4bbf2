"""Calls that take as long as recorded: how a rehearsal imitates work that is not done.

A driver that rehearses sets `wanted`; the processes that it launches are told by their session. A timed call of a phase
that is paced then sleeps until the recorded duration is over. Processes with the same accelerator take turns, call by
call, as work on a device does.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from rlinf_core import env_vars
from rlinf_core.process.abstract_sockets import bind, connected

# Between two looks whether the holder of a device, which has just bound its name, listens already.
_PAUSE: Final = 0.001
_BACKLOG: Final = 64


class Pace(NamedTuple):
    """The recorded duration of a call: seconds as `fix + slope x rows`, and how they spread, relative to that."""

    fix: float
    slope: float = 0.0
    spread: tuple[float, ...] = ()


class Pacing(NamedTuple):
    """The part of a record that a rehearsal needs.

    Attributes:
        paces: the duration of calls, by the tag of their timer.
        sizes: sizes of what has no duration, as answers have tokens, and how many had about that one, by phase.
    """

    paces: Mapping[str, Pace]
    sizes: Mapping[str, tuple[tuple[float, int], ...]] = {}


class PacedCalls:
    """The paced calls of this process.

    Args:
        pacing: how long they take.
        device: names the accelerator of this process among all machines; empty: it has none.
    """

    def __init__(self, pacing: Pacing, device: str = "") -> None:
        self.pacing = pacing
        self._name = f"rlinf-rehearsal-{device}" if device else ""
        self._draws = random.Random(device)

    def begin(self, tag: str) -> socket.socket | None:
        """Wait for the accelerator, if a call needs it, and return what holds it."""
        return _held(self._name) if self._name and tag in self.pacing.paces else None

    def end(self, tag: str, rows: int, began: float, holder: socket.socket | None) -> None:
        """Sleep until the call, which began at that moment, has taken its time; leave the accelerator to others."""
        pace = self.pacing.paces.get(tag)
        try:
            if pace is not None:
                factor = self._draws.choice(pace.spread) if pace.spread else 1.0
                time.sleep(max(0.0, began + (pace.fix + pace.slope * rows) * factor - time.perf_counter()))
        finally:
            if holder is not None:
                holder.close()


def _held(name: str) -> socket.socket:
    """Return a socket that has a name of this machine's, which the kernel gives to one at a time.

    Raises:
        TimeoutError: others have held it for RLINF_TIMEOUT seconds.
        OSError: the kernel makes no socket of this name.
    """
    ends = time.monotonic() + env_vars.TIMEOUT.get()
    while (own := bind(name)) is None:
        _wait_for_holder(name, ends - time.monotonic())
    own.listen(_BACKLOG)
    return own


def _wait_for_holder(name: str, seconds: float) -> None:
    if seconds <= 0:
        raise TimeoutError("the accelerator of a rehearsal was held by others all the time")
    try:
        other = connected(name, seconds)
    except OSError:
        # It does not listen yet, or has just let go.
        time.sleep(_PAUSE)
        return
    with other, suppress(ConnectionError):
        # Ends when the holder closes, or dies.
        other.recv(1)


# What the driver of a rehearsal wants of the processes that it launches; None: they work.
wanted: Pacing | None = None
# The paced calls of this process; None: it works.
active: PacedCalls | None = None


def want(pacing: Pacing | None) -> None:
    """Have processes that are launched from now on rehearse; None: work."""
    global wanted
    wanted = pacing


def start(pacing: Pacing, device: str) -> None:
    """Pace the calls of this process."""
    global active
    active = PacedCalls(pacing, device)


def recorded(phase: str) -> tuple[tuple[float, int], ...]:
    """Return the sizes of a phase that a rehearsal was given, see `Pacing`; none where this process works."""
    return () if active is None else tuple(active.pacing.sizes.get(phase, ()))
