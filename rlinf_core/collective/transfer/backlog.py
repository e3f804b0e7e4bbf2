"""The backlog: what has arrived and was not received yet. While it is too much, nothing more is read."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.transfer.received_message import ReceivedMessage

# Seconds between two looks at what no event reports, such as a send that somebody begins to wait for.
_SLICE = 0.1


class Backlog:
    """The undelivered messages of an endpoint: how many of each connection, and the bytes of all.

    A thread that reads waits here while they are too many, so that the kernel's buffers fill and the sender waits.
    """

    def __init__(self, settings: Settings) -> None:
        self._most_messages = settings.inbox_messages
        self._most_bytes = settings.inbox_bytes
        self._changed = threading.Condition()
        self._bytes = 0
        self._readers = 0

    def add(self, received: ReceivedMessage, connection: Connection) -> None:
        """Count a message that waits for a receive. It may be taken before that: what matters is the sum."""
        with self._changed:
            connection.backlog += 1
            self._bytes += received.nbytes

    def taken(self, received: ReceivedMessage) -> None:
        """Record that a message that waited was taken."""
        connection = received.connection
        if connection is None:
            return
        with self._changed:
            connection.backlog -= 1
            self._bytes -= received.nbytes
            if self._readers:
                self._changed.notify_all()

    def stir(self) -> None:
        """Have the threads that wait look again."""
        if self._readers:
            with self._changed:
                self._changed.notify_all()

    def wait_for_room(self, connection: Connection, awaited: Callable[[], bool]) -> None:
        """Wait, once it is full, until half of it is free; whatever is there, an awaited message is read."""
        if connection.backlog > self._most_messages or self._bytes > self._most_bytes:
            self._wait(lambda: connection.closed or self._is_half_free(connection) or awaited())

    def wait_for_bytes(self, connection: Connection, size: int, awaited: Callable[[], bool]) -> None:
        """Wait until a body of this size fits, or is all there is."""

        def fits() -> bool:
            return not self._bytes or self._bytes + size <= self._most_bytes

        if not fits():
            self._wait(lambda: connection.closed or fits() or awaited())

    def _is_half_free(self, connection: Connection) -> bool:
        return connection.backlog * 2 < self._most_messages and self._bytes * 2 < self._most_bytes

    def _wait(self, over: Callable[[], bool]) -> None:
        with self._changed:
            # Before the look: what happens after it wakes this thread.
            self._readers += 1
            try:
                while not over():
                    self._changed.wait(_SLICE)
            finally:
                self._readers -= 1
