"""The backlog: the messages that arrived and were not received yet. While there are too many, reading pauses."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.transfer.received_message import ReceivedMessage

# Seconds between two checks for changes that no event reports, such as a connection that another thread has shut.
_SLICE = 1.0


class _Pause:
    """A reading thread that pauses until at most `nbytes` wait to be received, or `look` wakes it."""

    def __init__(self, connection: Connection, nbytes: int) -> None:
        self.connection = connection
        self.nbytes = nbytes
        self.look = threading.Event()


def _limit(pause: _Pause) -> int:
    return pause.nbytes


class Backlog:
    """The undelivered messages of an endpoint: their number per connection, and the bytes of all of them and of the
    bodies that are being read.

    While there are too many, reading threads wait here, so that the kernel's buffers fill and the senders wait. There
    may be hundreds of waiting threads: a taken message wakes only those whose limit it crosses.
    """

    def __init__(self, settings: Settings) -> None:
        self._most_messages = settings.inbox_messages
        self._half_of_messages = (settings.inbox_messages - 1) // 2
        self._most_bytes = settings.inbox_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        # In ascending order of their limits.
        self._pauses: list[_Pause] = []

    def add(self, received: ReceivedMessage, connection: Connection, reserved: int = 0) -> None:
        """Count a message that waits for a receive; `reserved` of its bytes are counted already.

        `taken` may come before this call: only the sum matters.
        """
        with self._lock:
            connection.backlog += 1
            self._bytes += received.nbytes - reserved

    def taken(self, received: ReceivedMessage) -> None:
        """Record that a receive took a waiting message."""
        connection = received.connection
        if connection is None:
            return
        with self._lock:
            connection.backlog -= 1
            crossed = self._subtract(received.nbytes)
            if connection.backlog == self._half_of_messages:
                crossed.extend(pause for pause in self._pauses if pause.connection is connection)
        _wake(crossed)

    @property
    def holds_back(self) -> bool:
        """Whether any thread waits here."""
        return bool(self._pauses)

    def stir(self, incarnation: str | None = None) -> None:
        """Wake the waiting threads that read from an endpoint, or from any, so that they check again."""
        if not self._pauses:
            return
        with self._lock:
            pauses = list(self._pauses)
        _wake([one for one in pauses if incarnation in (None, one.connection.peer.incarnation)])

    def is_full(self, connection: Connection) -> bool:
        """Return whether reading a connection must wait for room, unless a message is awaited from it."""
        return connection.backlog > self._most_messages or self._bytes > self._most_bytes

    def wait_for_room(self, connection: Connection, awaited: Callable[[], bool]) -> None:
        """If the backlog is full, wait until half of it is free, or a message is `awaited` from the connection."""
        if self.is_full(connection):
            half = (self._most_bytes - 1) // 2
            self._wait(connection, half, lambda: connection.backlog <= self._half_of_messages, awaited)

    def reserve(self, connection: Connection, size: int, awaited: Callable[[], bool]) -> None:
        """Wait until a body fits, the backlog is empty, or the body is `awaited`; then count the body's bytes.

        Counting before reading means that bodies read at the same time stay within the limit together.
        """
        limit = max(0, self._most_bytes - size)

        def fits() -> bool:
            with self._lock:
                if self._bytes > limit:
                    return False
                self._bytes += size
                return True

        if not (fits() or self._wait(connection, limit, fits, awaited)):
            with self._lock:
                self._bytes += size

    def free(self, size: int) -> None:
        """Subtract the bytes of a body that was given to a receive or will not be read."""
        with self._lock:
            crossed = self._subtract(size)
        _wake(crossed)

    def _subtract(self, size: int) -> list[_Pause]:
        """Subtract bytes; return the paused threads whose limit is crossed. The caller holds the lock."""
        before, self._bytes = self._bytes, self._bytes - size
        start = bisect_left(self._pauses, self._bytes, key=_limit)
        return self._pauses[start : bisect_left(self._pauses, before, start, key=_limit)]

    def _wait(
        self, connection: Connection, nbytes: int, is_short: Callable[[], bool], awaited: Callable[[], bool]
    ) -> bool:
        """Wait; return True once there is room, False if the connection is closed or a message is awaited."""
        pause = _Pause(connection, nbytes)
        # Registered before the first check, so that a change after the check wakes this thread.
        with self._lock:
            insort(self._pauses, pause, key=_limit)
        try:
            # Checked without the lock, since hundreds of threads may check.
            while not connection.closed:
                if self._bytes <= nbytes and is_short():
                    return True
                if awaited():
                    return False
                pause.look.wait(_SLICE)
                pause.look.clear()
            return False
        finally:
            with self._lock:
                self._pauses.remove(pause)


def _wake(pauses: Sequence[_Pause]) -> None:
    for pause in pauses:
        pause.look.set()
