"""The current call in a worker, the carriers of failures and results, and durations of timed calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rlinf_core.errors import PayloadError
from rlinf_core.failures import PackedError


@dataclass(slots=True)
class MethodCall:
    """A method call running in this process.

    Attributes:
        serial: its id in Ray.
        task_key: the ident of its thread, or its task.
        operation: the serial of the method among the pending operations.
        given_up: the error for its operations once its caller has cancelled it.
    """

    serial: str
    task_key: Hashable
    operation: int = 0
    given_up: Exception | None = None


current_call: ContextVar[MethodCall | None] = ContextVar("rlinf_call", default=None)
"""The call that runs in this context."""


def check_call() -> None:
    """Raise the error of the current call if it was cancelled, so that it does not begin another wait."""
    call = current_call.get()
    if call is not None and call.given_up is not None:
        raise call.given_up


class RemoteFailure(Exception):  # noqa: N818 - a vehicle, never seen by users
    """A wrapper that carries a worker's exception through Ray, which would change its type."""

    def __init__(self, error: PackedError) -> None:
        super().__init__(error.type_name, error.text)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFailure, (self.error,)


def unpicklable(what: str, error: Exception, where: str | None = None) -> PayloadError:
    """Return the error for an argument or a result that does not pickle."""
    # Ray wraps the error in a long report.
    cause = error.__cause__ or error
    return PayloadError(
        f"{what} cannot be sent",
        where=where,
        why=f"it cannot be pickled: {type(cause).__name__}: {cause}",
        help="send plain data, and let workers create files, locks and connections themselves",
    )


class _Whole:
    """A container that Ray pickles; by itself Ray sends a list or a dict as a tree, and a bytearray as bytes."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._value,)


def _itself(value: object) -> object:
    return value


def whole(value: object) -> object:
    """Return what Ray delivers as `value`, with its own type and with objects that it holds several times."""
    return _Whole(value) if type(value) in (list, dict, bytearray) else value


@dataclass(frozen=True, slots=True)
class Timed:
    """A result with the durations measured in the call: seconds by tag."""

    result: Any
    durations: dict[str, float]


# Durations of the timed calls of this process, by tag and rows, from which a run's `profile.json` is made.


# The number of newest calls whose durations are kept for each tag and size.
_KEPT: Final = 64
# Sizes below this are distinguished exactly; larger ones by their two leading digits.
_EXACT: Final = 100
# The most pairs of tag and size that are kept; calls of further pairs are not recorded.
_MOST_KEYS: Final = 400


class CallRecord(NamedTuple):
    """The calls of one tag with about the same number of rows.

    Attributes:
        rows: the average rows of a call; 0 if it has none.
        calls: the number of calls.
        seconds: the sum of their durations.
        newest: the durations of the newest of them, in seconds.
    """

    tag: str
    rows: float
    calls: int
    seconds: float
    newest: tuple[float, ...]


class _Calls:
    __slots__ = ("calls", "newest", "rows", "seconds")

    def __init__(self) -> None:
        self.calls, self.rows, self.seconds = 0, 0.0, 0.0
        self.newest: deque[float] = deque(maxlen=_KEPT)


_calls: dict[tuple[str, int], _Calls] = {}


def size_of(rows: int) -> int:
    """Return the size under which calls with that many rows are recorded."""
    if rows < _EXACT:
        return rows
    unit = 10 ** (len(str(rows)) - 2)
    return rows // unit * unit


def forget_calls() -> None:
    """Forget all recorded calls, for example those of an earlier run in this process."""
    _calls.clear()


def add_call(tag: str, rows: int, seconds: float) -> None:
    """Record a call of that duration."""
    size = size_of(rows)
    kept = _calls.get((tag, size))
    if kept is None:
        if len(_calls) >= _MOST_KEYS:
            return
        kept = _calls.setdefault((tag, size), _Calls())
    kept.calls += 1
    kept.rows += rows
    kept.seconds += seconds
    kept.newest.append(seconds)


def call_records() -> list[CallRecord]:
    """Return the recorded calls of this process so far."""
    return [
        CallRecord(tag, kept.rows / kept.calls, kept.calls, kept.seconds, tuple(kept.newest))
        for (tag, _), kept in list(_calls.items())
        if kept.calls
    ]
