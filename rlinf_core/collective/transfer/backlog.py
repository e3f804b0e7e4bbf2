"""The backlog: what has arrived and was not received yet. While it is too much, nothing more is read."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.transfer.received_message import ReceivedMessage

# Seconds between two looks at what no event reports, such as a connection that another thread has shut.
_SLICE = 1.0


class _Pause:
    """A thread that reads nothing until no more than `nbytes` wait to be received, or it is to look again."""

    def __init__(self, connection: Connection, nbytes: int) -> None:
        self.connection = connection
        self.nbytes = nbytes
        self.look = threading.Event()


def _limit(pause: _Pause) -> int:
    return pause.nbytes


class Backlog:
    """The undelivered messages of an endpoint: how many of each connection, and the bytes of all.

    A thread that reads waits here while they are too many, so that the kernel's buffers fill and the sender waits. With
    hundreds of them, only those whose limit a taken message crosses are woken.
    """

    def __init__(self, settings: Settings) -> None:
        self._most_messages = settings.inbox_messages
        self._most_bytes = settings.inbox_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        # By their limits, ascending.
        self._pauses: list[_Pause] = []

    def add(self, received: ReceivedMessage, connection: Connection) -> None:
        """Count a message that waits for a receive. It may be taken before that: what matters is the sum."""
        with self._lock:
            connection.backlog += 1
            self._bytes += received.nbytes

    def taken(self, received: ReceivedMessage) -> None:
        """Record that a message that waited was taken."""
        connection = received.connection
        if connection is None:
            return
        with self._lock:
            connection.backlog -= 1
            before, self._bytes = self._bytes, self._bytes - received.nbytes
            crossed = self._between(self._bytes, before)
            if connection.backlog == self._half_of_messages:
                crossed.extend(pause for pause in self._pauses if pause.connection is connection)
        _wake(crossed)

    @property
    def holds_back(self) -> bool:
        """Whether any thread waits here."""
        return bool(self._pauses)

    def stir(self, incarnation: str | None = None) -> None:
        """Have the threads that read from an endpoint, or from any, look again."""
        if not self._pauses:
            return
        with self._lock:
            pauses = list(self._pauses)
        _wake([one for one in pauses if incarnation in (None, one.connection.peer.incarnation)])

    def wait_for_room(self, connection: Connection, awaited: Callable[[], bool]) -> None:
        """Wait, once it is full, until half of it is free; whatever is there, an awaited message is read."""
        if connection.backlog > self._most_messages or self._bytes > self._most_bytes:
            half = (self._most_bytes - 1) // 2
            self._wait(connection, half, lambda: connection.backlog <= self._half_of_messages, awaited)

    def wait_for_bytes(self, connection: Connection, size: int, awaited: Callable[[], bool]) -> None:
        """Wait until a body of this size fits, or is all there is."""
        limit = max(0, self._most_bytes - size)
        if self._bytes > limit:
            self._wait(connection, limit, lambda: True, awaited)

    @property
    def _half_of_messages(self) -> int:
        return (self._most_messages - 1) // 2

    def _between(self, after: int, before: int) -> list[_Pause]:
        """Return the threads whose limit lies between two numbers of bytes."""
        start = bisect_left(self._pauses, after, key=_limit)
        return self._pauses[start : bisect_left(self._pauses, before, start, key=_limit)]

    def _wait(
        self, connection: Connection, nbytes: int, is_short: Callable[[], bool], awaited: Callable[[], bool]
    ) -> None:
        pause = _Pause(connection, nbytes)
        # Before the look: what happens after it wakes this thread.
        with self._lock:
            insort(self._pauses, pause, key=_limit)
        try:
            # Without the lock: there may be hundreds who look.
            while not (connection.closed or (self._bytes <= nbytes and is_short()) or awaited()):
                pause.look.wait(_SLICE)
                pause.look.clear()
        finally:
            with self._lock:
                self._pauses.remove(pause)


def _wake(pauses: Sequence[_Pause]) -> None:
    for pause in pauses:
        pause.look.set()
