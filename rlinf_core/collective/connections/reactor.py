"""The reactor: the endpoint's own thread, which reads while nobody waits and writes what did not fit."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.spin import spin

_log = logging.getLogger(__name__)
_SLICE = 0.1


class Reactor:
    """The event loop of an endpoint: it waits for readiness of connections and calls them."""

    def __init__(self, name: str, may_resume: Callable[[Connection], bool], spin: float = 0.0) -> None:
        """`may_resume` returns whether a paused connection may read again."""
        self._spin = spin
        self._may_resume = may_resume
        self._epoll = select.epoll()
        self._peek = partial(self._epoll.poll, 0)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._held_back: set[Connection] = set()
        # Connections whose other side is gone, and of which not everything is read.
        self._hung: set[Connection] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"rlinf-io-{name}", daemon=True)
        self._thread.start()

    def add(self, connection: Connection) -> None:
        self._connections[connection.fd] = connection
        connection.watch = self.watch
        self._epoll.register(connection.fd, select.EPOLLIN)

    def watch(self, connection: Connection, reading: bool, writing: bool) -> None:
        if connection.closed or self._stopped:
            return
        events = (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if writing else 0)
        try:
            self._epoll.modify(connection.fd, events)
        except (OSError, ValueError):
            return  # the connection was closed meanwhile

    def hold_back(self, connection: Connection) -> None:
        """Retry a connection whose reading is paused at intervals."""
        if connection not in self._held_back:
            self._held_back.add(connection)
            self._call(lambda: None)

    def close(self, connection: Connection) -> None:
        """Close a connection from the reactor's thread, where nothing is held."""

        def run() -> None:
            self._held_back.discard(connection)
            self._hung.discard(connection)
            self._connections.pop(connection.fd, None)
            try:
                self._epoll.unregister(connection.fd)
            except (OSError, ValueError):
                _log.debug("connection %s was closed before", connection.name)
            connection.close()

        self._call(run)

    def stop(self) -> None:
        """End the thread and free its descriptors."""
        self._stopped = True
        self._call(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which has no such thread."""
        self._stopped = True
        self._epoll.close()
        os.close(self._wake)

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while True:
            events = spin(self._peek, time.monotonic() + self._spin) if self._spin else []
            if not events:
                events = self._epoll.poll(_SLICE if self._held_back else -1)
            for fd, event in events:
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                connection = self._connections.get(fd)
                if connection is not None:
                    self._serve(connection, event)
            while self._calls:
                self._guarded(self._calls.popleft())
            if self._stopped:
                return
            for connection in list(self._held_back):
                if connection.closed or self._may_resume(connection):
                    if connection not in self._hung:
                        self._held_back.discard(connection)
                    self._guarded(connection.ready)

    def _serve(self, connection: Connection, event: int) -> None:
        if event & select.EPOLLOUT:
            self._guarded(connection.writable)
        if event & ~select.EPOLLOUT:
            self._guarded(connection.ready)
        if event & (select.EPOLLHUP | select.EPOLLERR) and not connection.closed:
            # The kernel would report this without end, whatever events are asked for.
            self._epoll.unregister(connection.fd)
            self._hung.add(connection)
            self._held_back.add(connection)

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:  # noqa: BLE001 - this thread serves every connection: a fault in one must not end the others
            _log.exception("the data plane's own thread failed in a step")
