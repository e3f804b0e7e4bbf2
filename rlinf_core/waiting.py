"""The waits of a process as it tells them: until when, in what, and for whom."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

from rlinf_core import env_vars

# Seconds after which a wait says its first word; a shorter one is nobody's business.
FIRST_WORD_AFTER = 5.0


# A machine that is busier than this is stuck, and a limit should say so.
_MOST_STRETCH = 10.0


def stretched(seconds: float) -> float:
    """Return a time limit of an idle machine as it is now: longer by as much as its processors are asked for too often.

    Every limit of a start or a first contact that nobody gave goes through this, so that no constant takes a busy
    machine for a broken one.
    """
    try:
        load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return seconds
    return seconds * min(max(1.0, load), _MOST_STRETCH)


def contact_seconds() -> float:
    """Return the seconds that a first contact may take: `RLINF_CONNECT_TIMEOUT` as it is set, else its default
    stretched.
    """
    seconds = env_vars.CONNECT_TIMEOUT.get()
    return seconds if env_vars.CONNECT_TIMEOUT.is_set else stretched(seconds)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment `at` (`time.monotonic`) by which a wait of `seconds` must have ended."""

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float | None = None) -> Deadline:
        """Return the deadline `seconds` from now; None means `RLINF_TIMEOUT`. No wait is unbounded.

        Raises:
            ValueError: `seconds` is negative, infinite or not a number.
        """
        seconds = env_vars.TIMEOUT.get() if seconds is None else checked_seconds(seconds)
        return cls(seconds, time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return seconds that are left; 0 when there are none."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """Return the earlier one of this deadline and `seconds` from now: for one step of a longer wait."""
        at = time.monotonic() + seconds
        return Deadline(seconds, at) if at < self.at else self


def checked_seconds(timeout: float) -> float:
    """Return a timeout as somebody gave it. No wait is unbounded, and one of NaN seconds would be.

    Raises:
        ValueError: it is negative, infinite or not a number.
    """
    if not is_amount(timeout):
        raise ValueError(f"a timeout is a number of seconds from 0, not {timeout!r}")
    return timeout


def plain_seconds(timeout: float) -> float:
    """Return a timeout as a number of Python's own: clocks and locks take no other, not even numpy's.

    Raises:
        ValueError: it is negative, infinite, a tensor or no number at all.
    """
    kind = type(timeout)
    if kind is not float and kind is not int and not isinstance(timeout, Real):
        raise ValueError(f"a timeout is a number of seconds from 0, not {timeout!r}")
    try:
        return float(checked_seconds(timeout))
    except OverflowError:
        raise ValueError("a timeout is a number of seconds from 0, and this one is beyond all floats") from None


def is_amount(value: float) -> bool:
    """Return whether what a caller gave is a finite number from 0."""
    try:
        return 0 <= value < float("inf")
    except TypeError:
        return False


class OperationKind(StrEnum):
    """The kind of operation that a process is in. The value is the word that people read."""

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
    DEVICE_LOCK = "device_lock"


_ON_A_CHANNEL = frozenset(
    {OperationKind.PUT, OperationKind.GET, OperationKind.GET_BATCH, OperationKind.QUERY, OperationKind.CLOSE}
)
_TOWARDS = frozenset({OperationKind.SEND, OperationKind.SEND_TENSOR, OperationKind.BROADCAST, OperationKind.CONNECT})
_DEFAULT_KEY = "default"
# What a process does that is in an operation, where "waits in" and the title would not say it.
_WORDS = {
    OperationKind.IDLE: "is idle since {target}",
    OperationKind.METHOD: "runs `{target}`",
    OperationKind.GET: "waits on {channel}",
    OperationKind.GET_BATCH: "waits for a batch on {channel}",
    OperationKind.PUT: "waits for room on {channel}",
    OperationKind.QUERY: "waits for the state of {channel}",
    OperationKind.CLOSE: "waits until {channel} is closed",
    OperationKind.CALL: "waits for `{target}`",
    OperationKind.DEVICE_LOCK: "waits for the lock of {target}",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that a process is in.

    Attributes:
        kind: what it does.
        target: with whom or on what: an address, a channel's name, for a method or a call its name, or for an idle
            process how its last call ended; empty where it has had none.
        key: the key of the channel's queue, else None.
        since: when it began, on the monotonic clock of the process that is in it.
        serial: its number among all operations of that process: a later operation has a higher one.
        detached: whether it runs in the background while its process goes on (`async_op=True`).
        peers: the addresses that it is with, where `target` names none or not all, as for a call on a group.
        bounded: whether whoever waits in it gave it a time of its own, after which it goes on by itself.
    """

    kind: OperationKind
    target: str
    key: str | None
    since: float
    serial: int
    detached: bool = False
    peers: tuple[str, ...] = ()
    bounded: bool = False

    @property
    def title(self) -> str:
        """The operation as words, as in `recv from actor:0`."""
        if self.kind is OperationKind.IDLE:
            return "idle"
        if self.kind in _ON_A_CHANNEL:
            return f"{self.kind} on {self._channel}"
        if self.kind in (OperationKind.METHOD, OperationKind.CALL, OperationKind.LAUNCH):
            return f"{self.kind} `{self.target}`"
        if self.kind is OperationKind.DEVICE_LOCK:
            return f"{self.kind} of {self.target}"
        return f"{self.kind} {'to' if self.kind in _TOWARDS else 'from'} {self.target}"

    @property
    def _channel(self) -> str:
        key = f", key `{self.key}`" if self.key not in (None, _DEFAULT_KEY) else ""
        return f"channel `{self.target}`{key}"

    @property
    def doing(self) -> str:
        """The activity of its process, as in `waits in recv from actor:0`."""
        if self.kind is OperationKind.IDLE and not self.target:
            return "is idle: no method of it has been called"
        words = _WORDS.get(self.kind)
        return words.format(channel=self._channel, target=self.target) if words else f"waits in {self.title}"

    def waits(self, seconds: float, state: str = "") -> str:
        """Return what its process does, and for how long, as in `waits in recv from actor:0 for 12 s`.

        `state` is what it finds, as in `empty`; left out when empty.
        """
        if self.kind is OperationKind.IDLE and self.target:
            return f"{self.doing}, {spell_seconds(seconds)} ago"
        state_text = f", {state}," if state else ""
        return f"{self.doing}{state_text} for {spell_seconds(seconds)}"


def spell_seconds(seconds: float) -> str:
    """Return a duration as people read it: `0.4 s`, `12 s`, `31 min`, `2.5 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@dataclass(frozen=True, slots=True)
class PublishedOperation:
    """An operation as others see it: `age` is its seconds when published, since clocks differ between hosts."""

    operation: Operation
    age: float


@dataclass(frozen=True, slots=True)
class Publication:
    """The operations of one process at one moment, as it publishes them.

    Attributes:
        operations: all that it is in, oldest first.
        progress: a number that changes with every operation that begins, ends or moves bytes.
        running: whether some code of it is under way that is in no operation; when in doubt, it is.
        quiet: seconds since it was last in any operation or method; 0 while it is in one.
        last_call: how the last call of a method ended, as in "its `run` raised ValueError: no camera"; empty before.
    """

    operations: tuple[PublishedOperation, ...]
    progress: int
    running: bool
    quiet: float = 0.0
    last_call: str = ""
