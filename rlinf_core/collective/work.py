"""Work handles: the future results of operations, and of functions of those results; and the table of waits."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar, cast

from rlinf_core import env_vars
from rlinf_core.errors import CommunicationTimeoutError
from rlinf_core.process import activity
from rlinf_core.process.activity import InflightOps, current_task_key
from rlinf_core.suggest import short_repr
from rlinf_core.waiting import Operation, OperationKind, plain_seconds

T = TypeVar("T")
U = TypeVar("U")


_log = logging.getLogger(__name__)
# The shortest extension of an expired wait, in seconds, while a peer is being debugged.
_EXTENSION = 0.25


# Guards the state of all handles: held for a few instructions, never during a callback.
_lock = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: another thread may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Work(Generic[T]):
    """The future outcome of one operation. Any thread may wait for it, any number of times.

    A message is decoded once, by the first thread that asks for the result, so that a large copy or slow unpickling
    never delays the reading thread.

    Attributes:
        kind: the kind of the operation.
        target: its peer: an address, or the name of a channel.
        key: the key of a channel's queue, or None.
        seconds: its time limit.
        since: when it was issued, on the monotonic clock.
        serial: its number in the table of operations if it runs in the background, else None.
    """

    __slots__ = (
        "_callbacks",
        "_decode",
        "_decoding",
        "_done",
        "_error",
        "_value",
        "_waits",
        "key",
        "kind",
        "seconds",
        "serial",
        "since",
        "target",
    )

    def __init__(
        self,
        kind: OperationKind,
        target: str,
        seconds: float,
        waits: WaitTable | None = None,
        *,
        key: str | None = None,
        detached: bool = False,
        decode: Callable[[Any], T] | None = None,
    ) -> None:
        """Make the handle of an operation.

        Args:
            seconds: its time limit, from now.
            detached: whether it runs in the background, while its caller continues.
            decode: makes the result from the value passed to `arrive`. It must not refer to this handle: in a cycle, a
                large message would stay until the next garbage collection.
        """
        self.kind = kind
        self.target = target
        self.key = key
        self.seconds = seconds
        self.since = time.monotonic()
        self._waits = waits
        self.serial: int | None = None
        if waits is not None and detached:
            self.serial = waits.operations.begin(kind, target, key, detached=True)
        self._done = False
        self._value: object = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] | None = None
        self._decode = decode
        self._decoding = None if decode is None else threading.Lock()

    @property
    def title(self) -> str:
        """The operation as text, for example `recv from actor:0`."""
        return Operation(self.kind, self.target, self.key, 0.0, 0).title

    @property
    def deadline(self) -> float:
        return self.since + self.seconds

    @property
    def settled(self) -> bool:
        """Whether its outcome is known; unlike `done`, this decodes nothing."""
        return self._done

    def done(self) -> bool:
        """Return whether it has finished; decodes a result that has arrived."""
        if self._done:
            self._decode_once()
        return self._done

    def wait(self, timeout: float | None = None) -> T:
        """Return the operation's result.

        Args:
            timeout: seconds to wait at most; by default until the operation's own deadline. After a timeout the
                operation continues, and may be waited for again.

        Raises:
            CommunicationTimeoutError: it did not finish in time.
            ValueError: `timeout` is not a valid time.
            Exception: the error of the operation.
        """
        if not self._done:
            if timeout is None:
                deadline, seconds = self.deadline, self.seconds
            else:
                seconds = plain_seconds(timeout)
                deadline = time.monotonic() + seconds
            if not self.wait_until(deadline, seconds, extended=True):
                raise self._too_late(seconds)
        return self.result()

    def __await__(self) -> Generator[Any, None, T]:
        return self.async_wait().__await__()

    async def async_wait(self) -> T:
        """Return the result without blocking the event loop, see `wait`. Cancelling does not affect the operation."""
        deadline = self.deadline
        while not await self._async_wait_until(deadline):
            later = await asyncio.to_thread(self.later, self.since, self.seconds)
            if later is None:
                raise await asyncio.to_thread(self._too_late, self.seconds)
            deadline = later
        return self.result()

    async def _async_wait_until(self, deadline: float) -> bool:
        if self._done:
            return True
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)

        self.add_done_callback(wake)
        published = nullcontext() if self._waits is None else self._waits.during(self, current_task_key())
        try:
            with published, suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await woken.wait()
        finally:
            self._remove_callback(wake)
        return self._done

    def then(self, function: Callable[[T], U]) -> Work[U]:
        """Return a handle for `function(result)`, which is called in its own thread once this operation has succeeded.

        That handle fails if this operation fails or `function` raises. `function` has its own time limit, that of an
        operation without a timeout, from when it starts.

        Raises:
            TypeError: `function` is not callable, or is a coroutine function, which the thread would not run.
        """
        return ChainedWork(self, function)

    def result(self) -> T:
        """Return the result of a finished operation; raises its error if it failed."""
        if self._done:
            self._decode_once()
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def exception(self) -> BaseException | None:
        """Return the error of a finished operation, or None."""
        if self._done:
            self._decode_once()
        return self._error

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the operation finishes, in the thread that finishes it: it must not block.

        Errors that it raises there are logged. If the operation has finished, `callback` is called here at once.
        """
        with _lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, value: T) -> bool:
        return self._settle(value, None)

    def arrive(self, encoded: object) -> bool:
        """Finish with the argument for `decode`."""
        return self._settle(encoded, None)

    def fail(self, error: BaseException) -> bool:
        return self._settle(None, error)

    def wait_until(self, deadline: float, seconds: float | None = None, *, extended: bool = False) -> bool:
        """Wait until it is done or `deadline` (monotonic) passes; return whether it is done.

        Args:
            seconds: the length of the whole wait, which ends at `deadline`; by default the operation's time limit.
            extended: whether time in which a process of the job is being debugged does not count.
        """
        waits = self._waits
        if self._done or waits is None:
            return self._done or self._sleep_until(deadline)
        serial = waits.enter(self, None, seconds)
        limit = self.seconds if seconds is None else seconds
        began = deadline - limit
        try:
            while not self._sleep_until(deadline):
                later = self.later(began, limit) if extended else None
                if later is None:
                    return False
                deadline = later
            return True
        finally:
            waits.leave(self, serial)

    def later(self, began: float, seconds: float) -> float | None:
        """Return the extended deadline of an expired wait of `seconds` from `began`; None if it is not extended.

        Time in which a process of the job is being debugged does not count. Asks the manager; blocks briefly.
        """
        now = time.monotonic()
        paused = 0.0 if self._waits is None else self._waits.paused(self.target, now - began)
        deadline = began + seconds + paused
        return None if not paused or deadline <= now else max(deadline, now + _EXTENSION)

    def _sleep_until(self, deadline: float) -> bool:
        sleeper = threading.Lock()
        sleeper.acquire()
        wake = sleeper.release
        self.add_done_callback(wake)
        # A very long timeout overflows the platform's clock.
        if sleeper.acquire(timeout=min(1e6, max(0.0, deadline - time.monotonic()))):
            return True
        self._remove_callback(wake)
        return False

    def _remove_callback(self, callback: Callable[[], object]) -> None:
        with _lock:
            if self._callbacks is not None:
                self._callbacks = [other for other in self._callbacks if other is not callback]

    def _decode_once(self) -> None:
        if self._decoding is None or self._decode is None:
            return
        with self._decoding:
            if self._decode is None:
                return
            if self._error is None:
                try:
                    self._value = self._decode(self._value)
                except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
                    self._value, self._error = None, error
            self._decode = None

    def _settle(self, value: object, error: BaseException | None) -> bool:
        with _lock:
            if self._done:
                return False
            self._value, self._error = value, error
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
        if activity.recorder is not None:
            activity.recorder.add(activity.TRANSFER, self.title, self.since, time.monotonic())
        if self.serial is not None and self._waits is not None:
            self._waits.operations.end(self.serial)
        for callback in callbacks or ():
            try:
                callback()
            except Exception:  # noqa: BLE001 - the other callbacks must run, and this thread may read for every stream
                _log.exception("a callback of `%s` failed", self.title)
        return True

    def _too_late(self, seconds: float) -> CommunicationTimeoutError:
        picture = None if self._waits is None else self._waits.picture(self)
        return CommunicationTimeoutError(self.title, seconds, picture=picture)

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error is not None else "done"
        return f"<Work {self.title}: {state}>"


class ChainedWork(Work[U]):
    """The handle of a function's result, applied to the result of another operation."""

    __slots__ = ("_after",)

    def __init__(self, after: Work[T], function: Callable[[T], U]) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"`then` takes an ordinary function, not {short_repr(function)}: await the handle instead")
        name = getattr(function, "__qualname__", None) or repr(function)
        super().__init__(OperationKind.METHOD, name, env_vars.TIMEOUT.get())
        self._after = cast("Work[object]", after)

        def run() -> None:
            self.since = time.monotonic()
            try:
                value = function(after.result())
            except BaseException as error:  # noqa: BLE001 - any error of user code is the handle's outcome
                self.fail(error)
            else:
                self.finish(value)

        after.add_done_callback(lambda: threading.Thread(target=run, name="rlinf-then", daemon=True).start())

    @property
    def deadline(self) -> float:
        """The deadline of the other operation until that has finished, then that of the function."""
        return super().deadline if self._after.settled else self._after.deadline

    def wait(self, timeout: float | None = None) -> U:
        if timeout is None:
            self._after.wait_until(self._after.deadline, self._after.seconds, extended=True)
        return super().wait(timeout)

    async def async_wait(self) -> U:
        with suppress(Exception):
            # The base method: awaiting the other operation must not cancel it if this task is cancelled.
            await Work[object].async_wait(self._after)
        return await super().async_wait()

    def _too_late(self, seconds: float) -> CommunicationTimeoutError:
        after = self._after
        if not after.settled:
            return after._too_late(min(seconds, after.seconds))
        return super()._too_late(seconds)


class WaitTable:
    """The operations in which the threads and tasks of a process wait: publishes them, and can fail them.

    Attributes:
        operations: the table in which they are published.
        patience: the default time limit of an operation in seconds.
        picture: describes the peers that an expired operation waits for, if known; may block briefly.
        paused: returns how many of the last `seconds` do not count for a wait for `target`, because of debugging.
        check: called before a wait begins; raises if the thread must not wait.
        acknowledged: called when a wait begins that may be for the acknowledgement of a tensor.
    """

    def __init__(self, operations: InflightOps | None = None) -> None:
        self.operations = InflightOps() if operations is None else operations
        self.patience = 0.0
        self.picture: Callable[[Work[Any]], str | None] = lambda work: None
        self.paused: Callable[[str, float], float] = lambda target, seconds: 0.0
        self.check: Callable[[], object] = lambda: None
        self.acknowledged: Callable[[Work[Any]], object] = lambda work: None
        self._waiting: dict[int, Work[Any]] = {}
        # While the run is traced, by serial of a background operation: when a wait for it began, and in which task.
        self._traced: dict[int, tuple[float, Hashable]] = {}

    def waiting(self) -> list[Work[Any]]:
        """Return the operations in which threads and tasks wait now."""
        return list(self._waiting.copy().values())

    def fail(self, serial: int, error: BaseException) -> bool:
        """Fail the awaited operation with this serial; return False if it is not awaited."""
        work = self._waiting.get(serial)
        return work is not None and work.fail(error)

    def fail_task(self, task_key: Hashable, error: BaseException) -> None:
        """Fail the operations that a task, or a thread by its ident, waits in; with None, those of all tasks."""
        for serial, work in self._waiting.copy().items():
            if task_key is None or self.operations.task_key(serial) == task_key:
                work.fail(error)

    @contextmanager
    def during(self, work: Work[Any], task_key: Hashable = None) -> Generator[None, None, None]:
        """Publish, within the block, that the calling thread, or the task `task_key`, waits for `work`."""
        serial = self.enter(work, task_key)
        try:
            yield
        finally:
            self.leave(work, serial)

    def enter(self, work: Work[Any], task_key: Hashable = None, seconds: float | None = None) -> int:
        """Publish a wait of at most `seconds`, as `during` does; return the serial for `leave`."""
        self.check()
        bounded = (work.seconds if seconds is None else seconds) < self.patience
        serial = work.serial
        if serial is not None:
            self.operations.attach(serial, task_key, bounded=bounded)
            if activity.recorder is not None:
                self._traced[serial] = (time.monotonic(), task_key)
        else:
            serial = self.operations.begin(work.kind, work.target, work.key, task_key=task_key, bounded=bounded)
        self._waiting[serial] = work
        if work.kind is OperationKind.SEND_TENSOR:
            self.acknowledged(work)
        return serial

    def leave(self, work: Work[Any], serial: int) -> None:
        self._waiting.pop(serial, None)
        if activity.recorder is not None and serial in self._traced:
            since, task_key = self._traced.pop(serial)
            activity.recorder.add(activity.WAIT, work.title, since, time.monotonic(), task_key)
        if work.serial is None or work.settled:
            self.operations.end(serial)
        else:
            self.operations.detach(serial)
