"""The table of the operations that a process waits in: what it publishes of them, and what fails them from outside."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager

from rlinf_core.process import tracing
from rlinf_core.process.inflight_ops import InflightOps
from rlinf_core.waiting import Operation, OperationKind


class AwaitedOperation(ABC):
    """An operation that threads and tasks may wait for.

    Attributes:
        kind: what it does.
        target: its peer: an address, or the name of a channel.
        key: the key of a channel; None: none.
        seconds: its time limit.
        since: when it was issued, on the monotonic clock.
        serial: its number in the table while it continues in the background, else None.
    """

    __slots__ = ("key", "kind", "seconds", "serial", "since", "target")

    def __init__(self, kind: OperationKind, target: str, seconds: float, key: str | None) -> None:
        self.kind = kind
        self.target = target
        self.key = key
        self.seconds = seconds
        self.since = time.monotonic()
        self.serial: int | None = None

    @property
    def title(self) -> str:
        """The operation in words, as in `recv from actor:0`."""
        return Operation(self.kind, self.target, self.key, 0.0, 0).title

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether its outcome is known."""

    @abstractmethod
    def fail(self, error: BaseException) -> bool:
        """End it with an error; return False if it has ended before."""


class WaitTable:
    """The operations that the threads and tasks of a process wait in; publishes them, and fails them from outside.

    Attributes:
        operations: where they are published.
        patience: the default time limit of an operation in seconds.
        picture: describes the peers that an expired operation waits for, if known; may block briefly.
        paused: how many of the last seconds did not count for a wait for this target, as somebody debugged its peers.
        check: called before a wait begins; raises if it must not.
        acknowledged: called when a wait begins that may be for the acknowledgement of a tensor.
    """

    def __init__(self, operations: InflightOps | None = None) -> None:
        self.operations = InflightOps() if operations is None else operations
        self.patience = 0.0
        self.picture: Callable[[AwaitedOperation], str | None] = lambda work: None
        self.paused: Callable[[str, float], float] = lambda target, seconds: 0.0
        self.check: Callable[[], None] = _go_on
        self.acknowledged: Callable[[AwaitedOperation], object] = lambda work: None
        self._waiting: dict[int, AwaitedOperation] = {}
        # While the run is traced: since when who waits for what continues in the background.
        self._traced: dict[int, tuple[float, Hashable]] = {}

    def waiting(self) -> list[AwaitedOperation]:
        """Return what threads and tasks are blocked in now."""
        return list(self._waiting.copy().values())

    def fail(self, serial: int, error: BaseException) -> bool:
        """Fail the awaited operation with this serial; return False if it is not awaited."""
        work = self._waiting.get(serial)
        return work is not None and work.fail(error)

    def fail_task(self, task_key: Hashable, error: BaseException) -> None:
        """Fail the operations that a task, or a thread by its number, waits in; all of them for None."""
        for serial, work in self._waiting.copy().items():
            if task_key is None or self.operations.task_key(serial) == task_key:
                work.fail(error)

    @contextmanager
    def during(
        self, work: AwaitedOperation, task_key: Hashable = None, seconds: float | None = None
    ) -> Generator[None, None, None]:
        """Publish, within the block, that the calling thread, or the task `task_key`, waits for `work`.

        `seconds` is how long it waits at most; by default as long as the operation may take.
        """
        serial = self.enter(work, task_key, seconds)
        try:
            yield
        finally:
            self.leave(work, serial)

    def enter(self, work: AwaitedOperation, task_key: Hashable = None, seconds: float | None = None) -> int:
        """Do what `during` does first; return what `leave` takes."""
        self.check()
        bounded = (work.seconds if seconds is None else seconds) < self.patience
        serial = work.serial
        if serial is not None:
            self.operations.attach(serial, task_key, bounded=bounded)
            if tracing.recorder is not None:
                self._traced[serial] = (time.monotonic(), task_key)
        else:
            serial = self.operations.begin(work.kind, work.target, work.key, task_key=task_key, bounded=bounded)
        self._waiting[serial] = work
        if work.kind is OperationKind.SEND_TENSOR:
            self.acknowledged(work)
        return serial

    def leave(self, work: AwaitedOperation, serial: int) -> None:
        self._waiting.pop(serial, None)
        if tracing.recorder is not None and serial in self._traced:
            since, task_key = self._traced.pop(serial)
            tracing.recorder.add(tracing.WAIT, work.title, since, time.monotonic(), task_key)
        if work.serial is None or work.settled:
            self.operations.end(serial)
        else:
            self.operations.detach(serial)


def _go_on() -> None:
    """Allow every wait."""
