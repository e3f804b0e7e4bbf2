"""A body whose sender still writes it, as its receiver sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rlinf_core.collective.work import Poller, WaitTable, Work
from rlinf_core.waiting import OperationKind


class Growth:
    """The amount of a body that has arrived. One thread tells, and at most one waits.

    Args:
        size: of the whole body, in bytes.
        peer: the address of its sender.
        driver: how a waiting thread receives.
        waits: where waiting is published.
        seconds: what waiting takes at most where no receive has said so.
    """

    def __init__(self, size: int, peer: str, driver: Poller, waits: WaitTable, seconds: float) -> None:
        self._size = size
        self._peer = peer
        self._driver = driver
        self._waits = waits
        self._lock = threading.Lock()
        self._filled = 0
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._waiting: Work[object] | None = None
        self._seconds, self._since = seconds, time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether all is there."""
        return self._filled >= self._size

    @property
    def error(self) -> Exception | None:
        """Why the rest will never be there, or None."""
        return self._error

    def expect(self, seconds: float, since: float) -> None:
        """Let a receive take it, which may last so many seconds from then on."""
        self._seconds, self._since = seconds, since

    def grown(self, filled: int) -> None:
        """So many bytes are there now."""
        self._tell(filled, None)

    def fail(self, error: Exception) -> None:
        """Note that the rest will never be there."""
        self._tell(self._filled, error)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call `callback` once all is there or never will be, in the thread that hears of it: it must not block."""
        with self._lock:
            if not self.complete and self._error is None:
                self._callbacks.append(callback)
                return
        callback()

    def wait_beyond(self, filled: int) -> int:
        """Return how many bytes are there, once there are more than `filled`.

        Raises:
            CommunicationTimeoutError: none came in time.
            Exception: why none will come.
        """
        while True:
            with self._lock:
                if self._filled > filled:
                    return self._filled
                if self._error is not None:
                    raise self._error
                work: Work[object] = Work(OperationKind.RECV_TENSOR, self._peer, self._seconds, self._waits)
                work.since = self._since
                work.poller = self._driver
                self._waiting = work
            work.wait()

    def _tell(self, filled: int, error: Exception | None) -> None:
        with self._lock:
            self._filled, self._error = filled, error
            waiting, self._waiting = self._waiting, None
            callbacks: list[Callable[[], object]] = []
            if self.complete or error is not None:
                callbacks, self._callbacks = self._callbacks, []
        if waiting is not None:
            waiting.finish(None)
        for callback in callbacks:
            callback()
