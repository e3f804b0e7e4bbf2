"""Deadlines, and the published waits of a process."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from socket import socket
from typing import IO, Final

from rlinf_core import env_vars
from rlinf_core.suggest import short_repr

# Seconds after which a wait is first logged.
FIRST_WORD_AFTER = 5.0


# On a machine busier than this, limits are not extended further.
_MOST_STRETCH = 10.0
# If a yield of the core takes more seconds, another process needed the core, perhaps the one that we wait for.
_NEEDED_BY_OTHERS = 15e-6


def stretched(seconds: float) -> float:
    """Return a time limit extended by the current overload of this machine's processors.

    Every default limit of a start or a first contact uses this, so that a busy machine is not taken for a broken one.
    """
    try:
        load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return seconds
    return seconds * min(max(1.0, load), _MOST_STRETCH)


def is_readable(file: int | IO[bytes] | socket, seconds: float = 0) -> bool:
    """Wait up to `seconds` until a descriptor is readable or closed, or a pidfd's process ends; return whether."""
    # `select.select` does not accept descriptors above 1,023, which a process with many connections has.
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def spin(look: Callable[[], object], seconds: float) -> bool:
    """Poll `look` until it is true, or `seconds` have passed, or another process needs the core; return whether it is.

    For events that come within the time that a wake-up of a sleeping thread takes.
    """
    now = time.monotonic()
    until = now + seconds
    while now < until:
        if look():
            return True
        # The kernel often puts both sides on one core: polling without a yield would keep the other from answering.
        os.sched_yield()
        before, now = now, time.monotonic()
        if now - before > _NEEDED_BY_OTHERS:
            break
    return False


def contact_seconds() -> float:
    """Return the time limit of a first contact: `RLINF_CONNECT_TIMEOUT` if set, else its stretched default."""
    seconds = env_vars.CONNECT_TIMEOUT.get()
    return seconds if env_vars.CONNECT_TIMEOUT.is_set else stretched(seconds)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time `at` (`time.monotonic`) at which a wait of `seconds` must end."""

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float | None = None) -> Deadline:
        """Return the deadline `seconds` from now; None means `RLINF_TIMEOUT`. No wait is unbounded.

        Raises:
            ValueError: `seconds` is not a valid time, see `plain_seconds`.
        """
        seconds = env_vars.TIMEOUT.get() if seconds is None else plain_seconds(seconds)
        return cls(seconds, time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and `seconds` from now, for one step of a longer wait."""
        at = time.monotonic() + seconds
        return Deadline(seconds, at) if at < self.at else self


def plain_seconds(timeout: float) -> float:
    """Return a timeout as a Python float: clocks and locks accept no other types, not even NumPy's.

    Raises:
        ValueError: it is negative, infinite, a tensor or not a number, since no wait may be unbounded.
    """
    kind = type(timeout)
    is_number = kind is float or kind is int or isinstance(timeout, Real)
    if not is_number or not 0 <= timeout < float("inf"):
        raise ValueError(f"a timeout is a number of seconds from 0, not {short_repr(timeout)}")
    try:
        return float(timeout)
    except OverflowError:
        raise ValueError("a timeout is a number of seconds from 0, and this one exceeds the float range") from None


class OperationKind(StrEnum):
    """The kind of an operation. The value is its display name."""

    IDLE = "idle"
    METHOD = "method"
    SEND = "send"
    RECV = "recv"
    SEND_TENSOR = "send_tensor"
    RECV_TENSOR = "recv_tensor"
    BROADCAST = "broadcast"
    PUT = "put"
    GET = "get"
    GET_BATCH = "get_batch"
    QUERY = "query"
    CLOSE = "close"
    CONNECT = "connect"
    CALL = "call"
    LAUNCH = "launch"
    BREAKPOINT = "breakpoint"


# Operations of code that runs or is stopped in a debugger, and so does not wait for another process.
RUNNING = frozenset({OperationKind.METHOD, OperationKind.BREAKPOINT})

_ON_A_CHANNEL = frozenset(
    {OperationKind.PUT, OperationKind.GET, OperationKind.GET_BATCH, OperationKind.QUERY, OperationKind.CLOSE}
)
_TOWARDS = frozenset({OperationKind.SEND, OperationKind.SEND_TENSOR, OperationKind.BROADCAST, OperationKind.CONNECT})
_DEFAULT_KEY = "default"
# The first character of the encoded form of a channel's key that is not text: an invisible separator.
NO_TEXT: Final = "\u2063"
# Descriptions of operations for which "waits in TITLE" would be unclear.
_WORDS = {
    OperationKind.IDLE: "is idle since {target}",
    OperationKind.METHOD: "runs `{target}`",
    OperationKind.GET: "waits on {channel}",
    OperationKind.GET_BATCH: "waits for a batch on {channel}",
    OperationKind.PUT: "waits for room on {channel}",
    OperationKind.QUERY: "waits for the state of {channel}",
    OperationKind.CLOSE: "waits until {channel} is closed",
    OperationKind.CALL: "waits for `{target}`",
    OperationKind.BREAKPOINT: "waits at a breakpoint, {target}",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a process.

    Attributes:
        kind: its kind.
        target: its peer or object: an address, a channel's name, the name of a method or call, or for an idle process
            how its last call ended (empty without one).
        key: the key of the channel's queue, else None.
        age: its duration in seconds, since clocks differ between hosts.
        serial: its number among all operations of that process, ascending.
        detached: whether it runs in the background while its process continues (`async_op=True`).
        peers: its peers' addresses, if `target` does not name all, as for a call on a group.
        bounded: whether its caller set a timeout, after which the caller continues.
    """

    kind: OperationKind
    target: str
    key: str | None
    age: float
    serial: int
    detached: bool = False
    peers: tuple[str, ...] = ()
    bounded: bool = False

    @property
    def title(self) -> str:
        """The operation in words, as in `recv from actor:0`."""
        if self.kind is OperationKind.IDLE:
            return "idle"
        if self.kind in _ON_A_CHANNEL:
            return f"{self.kind} on {self._channel}"
        if self.kind in (OperationKind.METHOD, OperationKind.CALL, OperationKind.LAUNCH):
            return f"{self.kind} `{self.target}`"
        if self.kind is OperationKind.BREAKPOINT:
            return f"{self.kind} at {self.target}"
        return f"{self.kind} {'to' if self.kind in _TOWARDS else 'from'} {self.target}"

    @property
    def _channel(self) -> str:
        key = "" if self.key is None or self.key == _DEFAULT_KEY else f", key `{self.key.removeprefix(NO_TEXT)}`"
        return f"channel `{self.target}`{key}"

    @property
    def doing(self) -> str:
        """The activity of its process, as in `waits in recv from actor:0`."""
        if self.kind is OperationKind.IDLE and not self.target:
            return "is idle: no method of it has been called"
        words = _WORDS.get(self.kind)
        return words.format(channel=self._channel, target=self.target) if words else f"waits in {self.title}"

    def waits(self, state: str = "") -> str:
        """Return the activity of its process, with duration, as in `waits in recv from actor:0 for 12 s`.

        `state` is the awaited object's state, as in `empty`; omitted if empty.
        """
        if self.kind is OperationKind.IDLE and self.target:
            return f"{self.doing}, {spell_seconds(self.age)} ago"
        state_text = f", {state}," if state else ""
        return f"{self.doing}{state_text} for {spell_seconds(self.age)}"


def spell_seconds(seconds: float) -> str:
    """Return a readable duration: `0.4 s`, `12 s`, `31 min`, `2.5 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@dataclass(frozen=True, slots=True)
class Publication:
    """A published snapshot of one process's operations.

    Attributes:
        operations: its current operations, oldest first.
        progress: a number that changes with every operation that begins, ends or moves bytes.
        running: whether the process runs code outside of operations; True when in doubt.
        quiet: seconds since its last operation or method; 0 during one.
        last_call: how the last call of a method ended, as in "its `run` raised ValueError: no camera"; empty before.
    """

    operations: tuple[Operation, ...]
    progress: int
    running: bool
    quiet: float = 0.0
    last_call: str = ""
