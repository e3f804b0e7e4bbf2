"""The current call of a worker's code, and this process's unanswered calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import PayloadError
from rlinf_core.failures import PackedError, WorkerGroupError, followed, set_cause


@dataclass(slots=True)
class MethodCall:
    """A method call running in this process.

    Attributes:
        serial: its id in Ray.
        task_key: its thread's number, or its task.
        operation: the serial of the method among the operations in flight.
        given_up: the error for its operations after its caller cancelled it.
    """

    serial: str
    task_key: Hashable
    operation: int = 0
    given_up: Exception | None = None


_current: ContextVar[MethodCall | None] = ContextVar("rlinf_call", default=None)


def enter_call(call: MethodCall) -> Any:
    """Enter `call` in this context; return the token for `leave_call`."""
    return _current.set(call)


def leave_call(token: Any) -> None:
    _current.reset(token)


def check_call() -> None:
    """Raise the error of a cancelled call, so that it does not begin another wait."""
    call = _current.get()
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
    # Ray wraps it in its own long report.
    cause = error.__cause__ or error
    return PayloadError(
        f"{what} cannot be sent",
        where=where,
        why=f"it cannot be pickled: {type(cause).__name__}: {cause}",
        help="send plain data, and let workers create files, locks and connections themselves",
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """A result with the durations measured in the call, in seconds by tag."""

    result: Any
    durations: dict[str, float]


class CallHandle(Protocol):
    """The interface of a group call's handle, implemented by `WorkerGroupHandle`."""

    observed: bool

    @property
    def group(self) -> str: ...

    @property
    def matters(self) -> bool: ...

    def pending(self) -> list[WorkerAddress]: ...

    @property
    def failed(self) -> bool: ...

    def failure(self, grace: float = 0) -> WorkerGroupError | None: ...


class UnansweredCalls:
    """The handles of possibly unanswered calls."""

    # They are pruned whenever this many have accumulated.
    _FIRST_LIMIT = 64

    def __init__(self) -> None:
        # In the order in which they were made.
        self._handles: dict[CallHandle, None] = {}
        self._limit = self._FIRST_LIMIT
        self._lock = threading.Lock()

    def add(self, handle: CallHandle) -> None:
        with self._lock:
            if len(self._handles) >= self._limit:
                self._handles = {handle: None for handle in self._handles if handle.matters}
                self._limit = max(self._FIRST_LIMIT, 2 * len(self._handles))
            self._handles[handle] = None

    def forget(self, handle: CallHandle) -> None:
        """Forget a call whose results were read, so that they do not outlive its handle."""
        with self._lock:
            self._handles.pop(handle, None)

    def in_flight(self) -> tuple[str, ...]:
        with self._lock:
            handles = list(self._handles)
        return tuple({str(address) for handle in handles for address in handle.pending()})

    def tell_cause(self, error: BaseException) -> None:
        """Set the cause of a consequential error, if that is a failed call whose result was never read."""
        if error.__cause__ is not None or not followed(error):
            return
        with self._lock:
            handles = [handle for handle in self._handles if not handle.observed]
        for handle in handles:
            failure = handle.failure()
            if failure is not None and not followed(failure) and set_cause(error, failure):
                # It is reported with the error that it caused.
                handle.observed = True
                return

    def take(self, group: str) -> list[CallHandle]:
        with self._lock:
            own = [handle for handle in self._handles if handle.group == group]
            self._handles = {handle: None for handle in self._handles if handle.group != group}
        return own


unanswered = UnansweredCalls()


# Durations of the timed calls of this process, by tag and rows: what `profile.json` of a run is made of.


# Calls whose durations are kept of each tag and size, the newest ones.
_KEPT: Final = 64
# Sizes up to this are kept apart; larger ones by their two leading digits.
_EXACT: Final = 100
# Tags and sizes that are kept; what comes beyond is not.
_MOST_KEYS: Final = 400


class CallRecord(NamedTuple):
    """Calls of one tag with about as many rows.

    Attributes:
        tag: the name of the timer.
        rows: rows of a call on average; 0: it has none.
        calls: how many there were.
        seconds: their sum.
        newest: seconds of the newest of them.
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
    """Return the size that calls with that many rows are counted under."""
    if rows < _EXACT:
        return rows
    unit = 10 ** (len(str(rows)) - 2)
    return rows // unit * unit


def forget_calls() -> None:
    """Forget the calls so far, as those of an earlier run in this process."""
    _calls.clear()


def add_call(tag: str, rows: int, seconds: float) -> None:
    """Count a call that took that long."""
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
    """Return the calls of this process so far."""
    return [
        CallRecord(tag, kept.rows / kept.calls, kept.calls, kept.seconds, tuple(kept.newest))
        for (tag, _), kept in list(_calls.items())
        if kept.calls
    ]
