"""Paced calls: a rehearsal does no work, but its calls take as long as recorded.

A driver that rehearses sets `wanted`; the processes that it launches get it with their session. A timed call of a paced
phase then sleeps until the recorded duration is over. Processes with the same accelerator take turns, call by call, as
work on a device does.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from rlinf_core import env_vars
from rlinf_core.process.proc import bind, connected

# Seconds between two checks whether the holder of a device, which has just bound its name, listens already.
_PAUSE: Final = 0.001
_BACKLOG: Final = 64


class Pace(NamedTuple):
    """The recorded duration of a call: `fix + slope x rows` seconds, times one of the factors in `spread`."""

    fix: float
    slope: float = 0.0
    spread: tuple[float, ...] = ()


class Pacing(NamedTuple):
    """The part of a record that a rehearsal needs.

    Attributes:
        paces: the duration of calls, by the tag of their timer.
        sizes: pairs, by phase, of a size (for example tokens of an answer) and the number of items of about that size.
    """

    paces: Mapping[str, Pace]
    sizes: Mapping[str, tuple[tuple[float, int], ...]] = {}


class PacedCalls:
    """The paced calls of this process.

    Args:
        pacing: the recorded durations.
        device: the name of this process's accelerator, unique among all machines; empty if it has none.
    """

    def __init__(self, pacing: Pacing, device: str = "") -> None:
        self.pacing = pacing
        self._name = f"rlinf-rehearsal-{device}" if device else ""
        self._draws = random.Random(device)

    def begin(self, tag: str) -> socket.socket | None:
        """Wait for the accelerator if a call needs it; return the socket that holds it, or None."""
        return _held(self._name) if self._name and tag in self.pacing.paces else None

    def end(self, tag: str, rows: int, began: float, holder: socket.socket | None) -> None:
        """Sleep until a call that began at `began` (`time.perf_counter`) is over, then release the accelerator."""
        pace = self.pacing.paces.get(tag)
        try:
            if pace is not None:
                factor = self._draws.choice(pace.spread) if pace.spread else 1.0
                time.sleep(max(0.0, began + (pace.fix + pace.slope * rows) * factor - time.perf_counter()))
        finally:
            if holder is not None:
                holder.close()


def _held(name: str) -> socket.socket:
    """Return a socket bound to `name`, which the kernel allows for one process of this machine at a time.

    Raises:
        TimeoutError: other processes held the name for RLINF_TIMEOUT seconds.
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
        # The holder does not listen yet, or has just closed.
        time.sleep(_PAUSE)
        return
    with other, suppress(ConnectionError):
        # Returns when the holder closes or dies.
        other.recv(1)


# The pacing of processes that this driver launches; None if they do real work.
wanted: Pacing | None = None
# The paced calls of this process; None if it does real work.
active: PacedCalls | None = None


def want(pacing: Pacing | None) -> None:
    """Make the processes launched from now on rehearse; with None, do real work."""
    global wanted
    wanted = pacing


def start(pacing: Pacing, device: str) -> None:
    """Pace the calls of this process."""
    global active
    active = PacedCalls(pacing, device)


def recorded(phase: str) -> tuple[tuple[float, int], ...]:
    """Return the recorded sizes of a phase, see `Pacing`; empty if this process does not rehearse."""
    return () if active is None else tuple(active.pacing.sizes.get(phase, ()))
