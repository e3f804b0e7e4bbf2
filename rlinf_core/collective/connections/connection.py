"""A connection to another process: any thread writes frames, and the thread that waits for a message reads them.

A thread that waits for a message reads the socket itself, since handing a message over from a reading thread
would cost more than the message. While no thread waits, the endpoint's reactor thread reads. `_role` holds the reader.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rlinf_core.collective.connections.handshake import PeerIdentity
from rlinf_core.collective.connections.spin import spin
from rlinf_core.collective.memory.segment import SharedSegment
from rlinf_core.collective.messages.frame import Frame, FrameReader
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError, RuntimeFailure
from rlinf_core.process.proc import alive, identity, peer_credentials

_SLICE = 0.1
_BUFFERS_PER_CALL = 512
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
Bytes = bytes | bytearray | memoryview
# The start of the reason for which a connection is lost when its host cannot be reached any more.
NO_ANSWER = "its host no longer answers"
# SIOCOUTQNSD of Linux, which Python has no name for: asks how many bytes of a socket are not sent yet.
_UNSENT = 0x894B
_VANISHED = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


class ConnectionLostError(RuntimeFailure):
    """A connection that broke during an operation; the endpoint turns it into the error for the lost peer."""


class ConnectionHandler(ABC):
    """The callbacks of a connection."""

    spin: float

    @abstractmethod
    def place(self, connection: Connection, frame: Frame) -> memoryview | None:
        """Return the memory for the body of an arriving frame; None to pause reading."""

    @abstractmethod
    def arrived(self, connection: Connection, frame: Frame, body: memoryview | None) -> None:
        """Handle a complete frame. Must not block."""

    @abstractmethod
    def lost(self, connection: Connection, reason: str) -> None:
        """Take note that the connection is over."""

    @abstractmethod
    def moved(self) -> None:
        """Record that a part of a large message was received or sent."""


class Connection:
    """An authenticated connection.

    Attributes:
        shares_memory: whether file descriptors pass, so that large parts go through shared memory.
        segments: the peer's shared memory, by its identity.
        passed: identities of the shared memory whose descriptors were sent to the peer.
        backlog: messages that arrived and were not received yet; too many pause reading.
        watch: sets the events that the reactor polls for: readable, writable.
    """

    def __init__(self, name: str, sock: socket.socket, peer: PeerIdentity, watcher: ConnectionHandler) -> None:
        sock.setblocking(False)
        self.name = name
        self.peer = peer
        self.sock = sock
        self.fd = sock.fileno()
        self.shares_memory = sock.family == socket.AF_UNIX
        self.segments: dict[int, SharedSegment] = {}
        self.passed: set[int] = set()
        self.peer_closing = False
        self.paused = False
        self.backlog = 0
        # Empty for a process that cannot be seen from here.
        self._process = (identity(peer_credentials(sock)[0]) or "") if self.shares_memory else ""
        self.watch: Callable[[Connection, bool, bool], None] = _not_watched
        self._watcher = watcher
        self._deliver = partial(watcher.arrived, self)
        self._reader = FrameReader(sock, lambda frame: watcher.place(self, frame))
        self._role = threading.Lock()
        self._reading_thread: int | None = None
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._kick_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._arming = threading.Lock()
        self._armed = (True, False)
        self._outbox: deque[tuple[Bytes, Sequence[int]]] = deque()
        self._closed = False
        self._routes = 0
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._poll.register(self._kick, select.POLLIN)
        self._peek = partial(self._poll.poll, 0)

    def peer_is_dead(self) -> bool:
        """Return whether the peer's process is certainly gone: its memory is no longer mapped."""
        return is_dead(self._process)

    def hung_up(self) -> bool:
        """Return whether the peer ended the connection, though what it sent before may not be read yet."""
        if self._closed:
            return True
        look = select.poll()
        look.register(self.fd, select.POLLRDHUP)
        return bool(look.poll(0))

    @property
    def in_transit(self) -> bool:
        """Whether bytes were sent that the peer's kernel has not acknowledged, as where a link is cut.

        Those that the peer has no room for are not sent. False where the system does not say.
        """
        if self.shares_memory or self._closed:
            return False
        unacknowledged, unsent = array.array("i", [0]), array.array("i", [0])
        try:
            fcntl.ioctl(self.sock, termios.TIOCOUTQ, unacknowledged)
            fcntl.ioctl(self.sock, _UNSENT, unsent)
        except (OSError, ValueError):
            return False
        return unacknowledged[0] > unsent[0]

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def stalled(self) -> bool:
        """Whether reading is paused because there is no memory for a body."""
        return self._reader.stalled is not None

    def take_fd(self) -> int:
        return self._reader.take_fd()

    def next_route(self) -> int:
        """Return a number for a new pair of addresses that sends through this connection."""
        with self._kick_lock:
            self._routes += 1
            return self._routes

    # Reading

    def poll(self, work: Work[object], deadline: float) -> None:
        """Receive until `work` is done or the deadline passes; return at once when another thread receives."""
        if self._closed or not self._role.acquire(blocking=False):
            return
        try:
            self._reading_thread = threading.get_ident()
            self.arm()
            self._poll_until(work, deadline)
        finally:
            self._reading_thread = None
            self._role.release()
            self.arm()

    def _poll_until(self, work: Work[object], deadline: float) -> None:
        spin_until = time.monotonic() + self._watcher.spin
        look = False
        while not work.settled and not self._closed:
            if look and self.pump():
                continue
            if self._reader.stalled is not None:
                return  # the reactor tries again when there may be room
            now = time.monotonic()
            if now >= deadline:
                return
            look = False
            # A very long timeout overflows the platform's clock.
            events = spin(self._peek, spin_until) or self._poll.poll(min(deadline - now, 1e6) * 1000)
            for fd, _ in events:
                if fd == self._kick:
                    os.eventfd_read(self._kick)
                else:
                    look = True

    def wake(self) -> None:
        """End `poll` in whichever other thread is in it, so that it looks again."""
        reading = self._reading_thread
        if reading is not None and reading != threading.get_ident():
            self._wake()

    def _wake(self) -> None:
        with self._kick_lock:
            if self._kick >= 0:
                os.eventfd_write(self._kick, 1)

    def ready(self) -> None:
        """Read, unless a waiting thread does; called by the reactor when the socket is readable."""
        if not self._role.acquire(blocking=False):
            return
        try:
            # Several rounds, so that a burst is handled at once; but bounded, so that no connection starves the others.
            for _ in range(16):
                if self._closed or self.paused or not self.pump() or self._reader.drained:
                    break
        finally:
            self._role.release()
            self.arm()

    def arm(self) -> None:
        """Update the events that the reactor polls for, after any change that affects them."""
        if not self._closed:
            with self._arming:
                reading = self._reading_thread is None and not self.paused and not self.stalled
                writing = bool(self._outbox)
                if (reading, writing) != self._armed:
                    self._armed = (reading, writing)
                    self.watch(self, reading, writing)

    def pump(self) -> bool:
        """Read once; return whether anything was there. The caller holds the read lock."""
        try:
            came = self._reader.pump(self._deliver)
            if came and self._reader.midway:
                self._watcher.moved()
            return came
        except EOFError:
            self._watcher.lost(self, "it closed the connection")
        except OSError as error:
            self._watcher.lost(self, _broken(error))
        except RuntimeFailure as error:
            self._watcher.lost(self, str(error))
        return False

    # Writing

    def write(self, buffers: Sequence[Bytes], fds: Sequence[int], work: Work[object]) -> None:
        """Send the buffers as they are, blocking until the kernel has them all.

        Raises:
            ConnectionLostError: the connection is over.
            CommunicationTimeoutError: the peer did not read them before the deadline of `work`.
            Exception: what `work` was failed with meanwhile.
        """
        if not self._write_lock.acquire(timeout=max(0.0, min(work.deadline - time.monotonic(), 1e6))):
            raise CommunicationTimeoutError(work.title, work.seconds)
        try:
            while self._outbox:
                self._flush()
                if self._outbox:
                    self._await_room(work, started=False)
            self._write_all(list(buffers), fds, work)
        finally:
            self._write_lock.release()
        self._flush_leftovers()

    def try_write(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Send `data` if it does not block; return whether it was sent.

        Raises:
            ConnectionLostError: the connection is over.
        """
        if not self._write_lock.acquire(blocking=False):
            return False
        try:
            if self._outbox:
                return False
            sent = self._send([data], fds)
            if not sent:
                return False
            if sent < len(data):
                self._outbox.append((memoryview(data)[sent:], ()))
        finally:
            self._write_lock.release()
        self._flush_leftovers()
        return True

    def post(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send `data` now or as soon as there is room; never blocks, and raise nothing on a lost connection."""
        if fds or self._outbox or not self._write_lock.acquire(blocking=False):
            self._outbox.append((data, fds))
        else:
            try:
                self._post(data)
            finally:
                self._write_lock.release()
        if self._outbox:
            self._flush_leftovers()

    def _post(self, data: bytes) -> None:
        """Send what the kernel takes at once, and queue the rest. The caller holds the write lock."""
        sent = 0
        # Another thread may have queued data meanwhile: it goes first.
        if not self._outbox and not self._closed:
            try:
                sent = self.sock.send(data, _FLAGS)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reading thread sees the end of the connection and reports it
        if sent == len(data):
            return
        if sent:
            self._outbox.appendleft((memoryview(data)[sent:], ()))
        else:
            self._outbox.append((data, ()))

    def writable(self) -> None:
        """Flush the queue; called by the reactor when the socket is writable."""
        self._flush_leftovers()
        self.arm()

    def _flush_leftovers(self) -> None:
        while self._outbox and not self._closed and self._write_lock.acquire(blocking=False):
            try:
                self._flush()
            except ConnectionLostError:
                return  # the reading thread sees the end of the connection and reports it
            finally:
                self._write_lock.release()
            if self._outbox:
                self.arm()
                return

    def _flush(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            sent = self._send([data], fds)
            if sent == len(data):
                self._outbox.popleft()
                continue
            if sent:
                self._outbox[0] = (memoryview(data)[sent:], ())
            return

    def _write_all(self, buffers: list[Bytes], fds: Sequence[int], work: Work[object]) -> None:
        started = False
        while buffers:
            batch = buffers[:_BUFFERS_PER_CALL]
            sent = self._send(batch, fds)
            if not sent:
                self._await_room(work, started=started)
                continue
            started, fds = True, ()
            done = 0
            while done < len(batch) and sent >= len(batch[done]):
                sent -= len(batch[done])
                done += 1
            del buffers[:done]
            if sent:
                buffers[0] = memoryview(buffers[0])[sent:]
                self._watcher.moved()

    def _send(self, buffers: Sequence[Bytes], fds: Sequence[int]) -> int:
        if self._closed:
            raise ConnectionLostError("the connection is closed")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else ()
        try:
            return self.sock.sendmsg(buffers, ancillary, _FLAGS)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLostError(_broken(error)) from error

    def _await_room(self, work: Work[object], *, started: bool) -> None:
        """Wait until the socket is writable. A timeout ends the connection: a partial frame cannot be withdrawn."""
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        while True:
            error = work.exception()
            remaining = work.deadline - time.monotonic()
            if error is None and remaining <= 0:
                error = CommunicationTimeoutError(
                    work.title, work.seconds, picture="the other side no longer reads: its process hangs"
                )
            if error is None and self._closed:
                error = ConnectionLostError("the connection is closed")
            if error is not None:
                if started:
                    self._watcher.lost(self, "a message to it was given up halfway")
                raise error
            if poller.poll(min(remaining, _SLICE) * 1000):
                return

    # The end

    def shut(self) -> None:
        """End the traffic at once; descriptors are closed by `close`, when no thread uses them."""
        self._closed = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was shut down already
        finally:
            self._wake()

    def close(self) -> None:
        """End the connection and free what it holds, once no thread uses it."""
        self.shut()
        with self._role, self._write_lock, self._kick_lock:
            if self._kick < 0:
                return
            self.sock.close()
            os.close(self._kick)
            self._kick = -1
            self._reader.close()
            self.segments.clear()
            self._outbox.clear()

    def abandon(self) -> None:
        """Close the descriptors in a forked child without notifying the peer."""
        self._closed = True
        self.sock.close()
        if self._kick >= 0:
            os.close(self._kick)
            self._kick = -1


def is_dead(process: str) -> bool:
    """Return whether the process with this identity has certainly ended on this host; False for an empty identity."""
    return bool(process) and not alive(process)


def _broken(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{NO_ANSWER}: {reason}" if error.errno in _VANISHED else f"the connection broke: {reason}"


def _not_watched(connection: Connection, reading: bool, writing: bool) -> None:
    """Do nothing: the default before the reactor knows the connection."""
