"""Calls: the one that code of a worker runs for, and those of this process that are not answered yet."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf_core.address import WorkerAddress
from rlinf_core.failures import PackedError, WorkerGroupError, followed, set_cause


@dataclass(slots=True)
class MethodCall:
    """A call of a method that goes on in this process.

    Attributes:
        serial: the id that Ray gave it.
        task_key: what it holds up: the number of its thread, or its task.
        operation: the serial of the method among the operations in flight.
        given_up: what its operations raise, since whoever made it gave it up.
    """

    serial: str
    task_key: Hashable
    operation: int = 0
    given_up: Exception | None = None


_current: ContextVar[MethodCall | None] = ContextVar("rlinf_call", default=None)


def enter_call(call: MethodCall) -> Any:
    """Run code of this context for `call`; return what `leave_call` takes."""
    return _current.set(call)


def leave_call(token: Any) -> None:
    _current.reset(token)


def check_call() -> None:
    """Raise the error of a call that was given up, so that it does not begin another wait."""
    call = _current.get()
    if call is not None and call.given_up is not None:
        raise call.given_up


class RemoteFailure(Exception):  # noqa: N818 - a vehicle, never seen by users
    """Carries a worker's exception through Ray, which would otherwise change its type."""

    def __init__(self, error: PackedError) -> None:
        super().__init__(error.type_name, error.text)
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFailure, (self.error,)


@dataclass(frozen=True, slots=True)
class Timed:
    """A result with the durations that were measured in the call, in seconds by tag."""

    result: Any
    durations: dict[str, float]


class CallHandle(Protocol):
    """The handle of a call on a group; `WorkerGroupHandle` is the one there is."""

    observed: bool

    @property
    def group(self) -> str: ...

    @property
    def matters(self) -> bool: ...

    def pending(self) -> list[WorkerAddress]: ...

    def failure(self) -> WorkerGroupError | None: ...


class UnansweredCalls:
    """The handles of calls that may not be answered yet."""

    # They are looked through whenever so many have come together.
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
        """Forget a call whose results somebody has: they shall not live longer than its handle."""
        with self._lock:
            self._handles.pop(handle, None)

    def in_flight(self) -> tuple[str, ...]:
        with self._lock:
            handles = list(self._handles)
        return tuple({str(address) for handle in handles for address in handle.pending()})

    def tell_cause(self, error: BaseException) -> None:
        """Give an error that followed from another one its cause, where that is a failed call nobody has waited for."""
        if error.__cause__ is not None or not followed(error):
            return
        with self._lock:
            handles = [handle for handle in self._handles if not handle.observed]
        for handle in handles:
            failure = handle.failure()
            if failure is not None and not followed(failure) and set_cause(error, failure):
                # It is told by the error that it caused.
                handle.observed = True
                return

    def take(self, group: str) -> list[CallHandle]:
        with self._lock:
            own = [handle for handle in self._handles if handle.group == group]
            self._handles = {handle: None for handle in self._handles if handle.group != group}
        return own


unanswered = UnansweredCalls()
