"""Handles of asynchronous operations, and the withdrawal of operations whose handles are dropped.

A get is withdrawn then, for what came for it would be nobody's; a put goes on, and its failure is told in the log.

A destructor runs in any thread at any point, also in the midst of code that holds a lock: those here take none, and
leave the rest to a thread of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from rlinf_core.channel.operation import ChannelOperation
from rlinf_core.collective.work import Work

T = TypeVar("T")
U = TypeVar("U")
_log = logging.getLogger("rlinf")


@dataclass(frozen=True, slots=True)
class _FailedPut:
    """A put that failed, and nobody has asked."""

    channel: str
    key: str | None
    error: BaseException


_Dropped: TypeAlias = ChannelOperation[Any] | _FailedPut


class GetHandle(Work[T]):
    """The handle of an asynchronous get.

    It delegates to the operation, which the runtime holds too: so that its caller dropping the handle is noticed.
    """

    __slots__ = ("_bound", "_operation")

    def __init__(self, operation: ChannelOperation[T]) -> None:
        self._operation = operation
        # Whether its result was handed out, or goes to a function.
        self._bound = False

    def __getattr__(self, name: str) -> Any:
        # The base's attributes, which are not set here.
        if name == "_operation":
            raise AttributeError(name)
        return getattr(self._operation, name)

    def wait(self, timeout: float | None = None) -> T:
        value = self._operation.wait(timeout)
        self._bound = True
        return value

    async def async_wait(self) -> T:
        value = await self._operation.async_wait()
        self._bound = True
        return value

    def then(self, function: Callable[[T], U]) -> Work[U]:
        self._bound = True
        return self._operation.then(function)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        self._bound = True
        self._operation.add_done_callback(callback)

    def result(self) -> T:
        self._bound = self._operation.settled
        return self._operation.result()

    def done(self) -> bool:
        return self._operation.done()

    def exception(self) -> BaseException | None:
        return self._operation.exception()

    def finish(self, value: T) -> bool:
        return self._operation.finish(value)

    def fail(self, error: BaseException) -> bool:
        return self._operation.fail(error)

    def wait_until(self, deadline: float, seconds: float | None = None) -> bool:
        return self._operation.wait_until(deadline, seconds)

    def __del__(self) -> None:
        if not self._bound:
            self._operation.forsake()
            _dropped.put(self._operation)


class PutOperation(ChannelOperation[None]):
    """An asynchronous put. It is its caller's, and of those who carry it out."""

    # Set once somebody has heard how it ended.
    __slots__ = ("_heard",)

    def result(self) -> None:
        self._heard = True
        if self._error is not None:
            raise self._error

    def exception(self) -> BaseException | None:
        self._heard = True
        return super().exception()

    def abandon(self) -> None:
        self._heard = True
        super().abandon()

    def __del__(self) -> None:
        if self._error is not None and not hasattr(self, "_heard"):
            _dropped.put(_FailedPut(self.target, self.key, self._error))


# Its `put` may be called in the midst of itself.
_dropped: SimpleQueue[_Dropped] = SimpleQueue()
_started = False
_lock = threading.Lock()


def see_to_dropped() -> None:
    """From now on there is a thread that sees to what callers let go of."""
    global _started
    if _started:
        return
    with _lock:
        if not _started:
            threading.Thread(target=_see_to_all, name="rlinf-channel-dropped", daemon=True).start()
            _started = True


def _begin_anew() -> None:
    """In a child: what its parent holds is not its own."""
    global _dropped, _started, _lock
    _dropped = SimpleQueue()
    _started, _lock = False, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def _see_to_all() -> None:
    while True:
        _see_to([_dropped.get(), *_there()])


def _there() -> list[_Dropped]:
    """Return what waits to be seen to now."""
    found: list[_Dropped] = []
    while True:
        try:
            found.append(_dropped.get_nowait())
        except Empty:
            return found


def _see_to(dropped: list[_Dropped]) -> None:
    failures: Counter[tuple[str, str | None, str]] = Counter()
    for one in dropped:
        if isinstance(one, _FailedPut):
            failures[one.channel, one.key, " ".join(str(one.error).split())] += 1
            continue
        try:
            _withdraw(one)
        except Exception:  # noqa: BLE001 - it is somebody's operation, and the others are to be seen to
            _log.exception("channel `%s`: a get that nobody waits for could not be withdrawn", one.target)
    for (channel, key, error), count in failures.items():
        _log.error(
            "channel `%s`, key `%s`: %d puts failed that nobody waited for, and their items are lost: %s",
            channel,
            key,
            count,
            error,
        )


def _withdraw(operation: ChannelOperation[Any]) -> None:
    operation.abandon()
    if not operation.settled:
        # It arrives at this very moment.
        operation.add_done_callback(lambda: _dropped.put(operation))
    elif operation.discard():
        _log.warning(
            "channel `%s`, key `%s`: what was got is lost, for nobody has asked the handle for it",
            operation.target,
            operation.key,
        )


atexit.register(lambda: _see_to(_there()))
