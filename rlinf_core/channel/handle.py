"""The handles of asynchronous operations, and the reaper that ends operations for which no caller waits.

A get whose handle is dropped is cancelled, so that its item goes to another consumer. A put whose handle is dropped
continues, and its failure is logged.

Destructors run in any thread at any point, even while the thread holds a lock: those of this module take no lock, and
leave the work to the reaper's thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from rlinf_core.channel.operation import ChannelOperation
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError
from rlinf_core.waiting import OperationKind

T = TypeVar("T")
U = TypeVar("U")
_log = logging.getLogger("rlinf")
# Seconds between deadline checks of operations without a waiter.
_LOOK_EVERY = 0.25


class GetHandle(Work[T]):
    """The handle of an asynchronous get.

    It is separate from the operation, to which the runtime also refers, so that a dropped handle is noticed.
    """

    __slots__ = ("_bound", "_operation")

    def __init__(self, operation: ChannelOperation[T]) -> None:
        self._operation = operation
        # Whether the result was returned, or will be passed to a function.
        self._bound = False

    def __getattr__(self, name: str) -> Any:
        # Serves the attributes of `Work`, which this class does not set.
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
        chained = self._operation.then(function)
        self._bound = True
        return chained

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

    def wait_until(self, deadline: float, seconds: float | None = None, *, extended: bool = False) -> bool:
        return self._operation.wait_until(deadline, seconds, extended=extended)

    def __del__(self) -> None:
        if not self._bound:
            self._operation.mark_dropped()
            REAPER.dropped.put(self._operation)


class PutOperation(ChannelOperation[None]):
    """An asynchronous put, shared by its caller and its sender."""

    # Set once its outcome has been read.
    __slots__ = ("_heard",)

    def result(self) -> None:
        self._heard = True
        if self._error is not None:
            raise self._error

    def exception(self) -> BaseException | None:
        self._heard = True
        return super().exception()

    def cancel(self) -> None:
        self._heard = True
        super().cancel()

    def __del__(self) -> None:
        if self._error is not None and not hasattr(self, "_heard"):
            REAPER.dropped.put(self)


def operation_class(kind: OperationKind, *, detached: bool) -> type[ChannelOperation[Any]]:
    """Return the class of an operation: for an asynchronous put, the one whose unread failure the reaper logs."""
    return PutOperation if detached and kind is OperationKind.PUT else ChannelOperation


class Reaper:
    """The thread of a process that ends channel operations without a waiting caller.

    It cancels gets with dropped handles, logs failed puts whose outcome was never read, and expires operations without
    a waiter at their deadlines. It starts with the first operation that may need it.

    Attributes:
        dropped: the operations that destructors leave to this thread; None wakes it. A destructor may run inside `put`.
    """

    def __init__(self) -> None:
        self.dropped: SimpleQueue[ChannelOperation[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        # By identity, since dicts are compared by content.
        self._tables: dict[int, dict[int, ChannelOperation[Any]]] = {}

    def watch(self, table: dict[int, ChannelOperation[Any]]) -> None:
        """Expire the pending operations of a table, keyed by id, at their deadlines, until the table is empty."""
        if id(table) in self._tables:
            return
        with self._lock:
            if not self._started:
                threading.Thread(target=self._run, name="rlinf-channel-reaper", daemon=True).start()
                self._started = True
            self._tables[id(table)] = table
        self.dropped.put(None)  # wakes the thread, which may wait without a time limit

    def _run(self) -> None:
        next_look = 0.0
        while True:
            pause = max(0.0, next_look - time.monotonic()) if self._tables else None
            with suppress(Empty):
                self.handle_dropped(self.dropped.get(timeout=pause))
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_EVERY
                for table in list(self._tables.copy().values()):
                    _expire(table)
                    with self._lock:
                        # Under the lock: for an operation added after this check, `watch` adds the table again.
                        if not table:
                            del self._tables[id(table)]

    def handle_dropped(self, *first: ChannelOperation[Any] | None) -> None:
        """Handle all work left by destructors so far, `first` first."""
        failures: Counter[tuple[str, str | None, str]] = Counter()
        dropped = list(first)
        with suppress(Empty):
            while True:
                dropped.append(self.dropped.get_nowait())
        for operation in dropped:
            if operation is None:
                continue
            if operation.kind is OperationKind.PUT:
                failures[operation.target, operation.key, " ".join(str(operation.exception()).split())] += 1
                continue
            try:
                self._cancel(operation)
            except Exception:  # noqa: BLE001 - one failure must not stop the reaper
                _log.exception("channel `%s`: a get whose handle was dropped could not be cancelled", operation.target)
        for (channel, key, error), count in failures.items():
            _log.error(
                "channel `%s`, key `%s`: %d puts failed without a waiter, and their items are lost: %s",
                channel,
                key,
                count,
                error,
            )

    def _cancel(self, operation: ChannelOperation[Any]) -> None:
        operation.cancel()
        if not operation.settled:
            # Its result is arriving: cancel it again then.
            operation.add_done_callback(lambda: self.dropped.put(operation))
        elif operation.discard():
            _log.warning(
                "channel `%s`, key `%s`: an item is lost: it was delivered to a get whose handle was dropped unread",
                operation.target,
                operation.key,
            )


def _expire(operations: dict[int, ChannelOperation[Any]]) -> None:
    """Expire the operations without a waiter whose deadline has passed."""
    now = time.monotonic()
    for operation in list(operations.copy().values()):
        # A waiting caller expires its operation itself, precisely and with a description of the waits.
        if now >= operation.deadline + _LOOK_EVERY and operation.later(operation.since, operation.seconds) is None:
            operation.expire(CommunicationTimeoutError(operation.title, operation.seconds), wait=False)


REAPER: Final = Reaper()
# A forked child starts afresh: the handles of its parent's callers are not its own.
os.register_at_fork(after_in_child=REAPER.__init__)
atexit.register(REAPER.handle_dropped)
