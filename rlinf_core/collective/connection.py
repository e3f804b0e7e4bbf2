"""A connection to another process: any thread may write frames; one thread per connection reads them, or a caller.

A thread that reads for a waiting caller costs two wake-ups for each message. So while messages follow each other
closely, a caller that waits for one of them reads for itself, and the thread stands by. The thread goes on once another
caller waits as well, a frame may have to wait for something, the connection ends, or no message follows closely.
"""

from __future__ import annotations

import array
import errno
import fcntl
import itertools
import select
import socket
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from rlinf_core.collective.arena import SharedSegment
from rlinf_core.collective.frame import FrameReader
from rlinf_core.collective.handshake import PeerIdentity
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError, RuntimeFailure
from rlinf_core.process.proc import alive, identity, peer_credentials
from rlinf_core.waiting import spin

# The seconds between messages that follow each other closely, and for which the thread stands by after the last read.
_CLOSELY: Final = 1e-3
# The most seconds for which a caller that reads waits for a message, and so notices late that it was cancelled.
_LONGEST: Final = 10e-3


class ReadingTurn:
    """The turn to read one connection; its thread has it at first.

    Args:
        spin_seconds: how long a caller polls for the next message before it sleeps.

    Attributes:
        read_some: reads what has arrived, without waiting; returns False if the connection's thread must go on.
        led: whether a caller is in `read_some`.
    """

    def __init__(self, reader: FrameReader, spin_seconds: float) -> None:
        self.read_some: Callable[[], bool] = lambda: False
        self.led = False
        self._reader = reader
        self._spin_seconds = spin_seconds
        self._turn = threading.Lock()
        self._turn.acquire()
        # How often a caller took the turn.
        self._taken = 0
        # The operations of the callers that sleep while another thread reads, and since when.
        self._sleeping: list[tuple[Work[object], float]] = []
        # Whether the thread must go on; until it does, no caller takes the turn.
        self._needed = False
        self._failure: Exception | None = None
        self._wake = threading.Event()

    # The connection's thread

    def stand_by(self) -> None:
        """Let callers read, if messages follow each other closely; return once the thread must go on.

        Raises:
            Exception: the error at which a caller's reading ended.
        """
        if not self._sleeping or not self._all_served():
            return
        self._turn.release()
        read = True
        while read and not self._needed and self._all_served():
            taken = self._taken
            self._wake.wait(_CLOSELY)
            self._wake.clear()
            read = taken != self._taken or self._turn.locked()
        self._turn.acquire()
        self._needed = False
        if self._failure is not None:
            raise self._failure

    # Callers

    def wait(self, work: Work[object], deadline: float, sleep: Callable[[], bool]) -> bool:
        """Read until `work` is settled or the deadline passes, or `sleep` while another thread reads.

        Return whether it is settled, as `sleep` does.
        """
        if not self._take():
            entry = work, time.monotonic()
            self._sleeping.append(entry)
            try:
                # Again, since the thread that had the turn may not have seen the entry.
                if not self._take():
                    return sleep()
            finally:
                self._sleeping.remove(entry)
        try:
            self._read_until(work, deadline)
        finally:
            self._turn.release()
            if self._failure is not None or not self._all_served():
                self._needed = True
            if self._needed:
                self._wake.set()
        return sleep()

    def _take(self) -> bool:
        if not self._turn.acquire(blocking=False):
            return False
        if self._needed or self._failure is not None:
            self._turn.release()
            return False
        self._taken += 1
        return True

    def _all_served(self) -> bool:
        """Return whether the operations of all callers that sleep are settled, and were soon."""
        now = time.monotonic()
        return all(work.settled and now - since < _CLOSELY for work, since in self._sleeping.copy())

    def _read_until(self, work: Work[object], deadline: float) -> None:
        while not (work.settled or self._needed) and (remaining := deadline - time.monotonic()) > 0:
            spun = spin(partial(self._reader.await_bytes, 0.0), self._spin_seconds)
            if spun or self._reader.await_bytes(min(remaining, _LONGEST)):
                self._read_once()
            elif remaining > _LONGEST:
                self._needed = True

    def _read_once(self) -> None:
        # Kept if this thread is interrupted, for example by a signal: then part of a message may be lost.
        self._failure = RuntimeFailure("the thread that read it was interrupted")
        self.led = True
        try:
            self._needed = not self.read_some()
            self._failure = None
        except Exception as error:  # noqa: BLE001 - the connection's thread raises it
            self._failure, self._needed = error, True
        finally:
            self.led = False


_SLICE = 0.1
_BUFFERS_PER_CALL = 512
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
Bytes = bytes | bytearray | memoryview
# The start of the reason of a lost connection whose host can no longer be reached.
NO_ANSWER = "its host no longer answers"
# SIOCOUTQNSD of Linux, which Python does not name: returns how many bytes of a socket are not sent yet.
_UNSENT = 0x894B
_VANISHED = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


class ConnectionLostError(RuntimeFailure):
    """A connection that broke during an operation; the endpoint turns it into the error for the lost peer."""


class Connection:
    """An authenticated connection.

    Args:
        moved: called when a part of a large message was sent.
        spin: the seconds for which its reader polls before it sleeps.
        caller_spin: the seconds for which a caller that reads it polls before it sleeps.

    Attributes:
        shares_memory: whether it passes file descriptors, so that large parts go through shared memory.
        segments: the peer's shared memory, by its identity.
        passed: identities of the shared memory whose descriptors were sent to the peer.
        backlog: the number of messages that arrived and were not received yet; too many pause reading.
        reader: the reader of frames, for the thread that has the turn only.
        turn: the turn to read it, which its thread has at first.
        closed: whether traffic has ended.
        replaced: whether a newer connection replaces it: then it is read to its end, even with a full backlog.
        former: the connections that it replaced and that were still being read then.
        drained: set when all its messages were handled and its reader has ended.
    """

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        peer: PeerIdentity,
        moved: Callable[[], None],
        spin: float = 0.0,
        caller_spin: float = 0.0,
    ) -> None:
        sock.setblocking(True)
        self.name = name
        self.peer = peer
        self.sock = sock
        self.shares_memory = sock.family == socket.AF_UNIX
        self.segments: dict[int, SharedSegment] = {}
        self.passed: set[int] = set()
        self.peer_closing = False
        self.backlog = 0
        self.reader = FrameReader(sock, spin)
        self.turn = ReadingTurn(self.reader, caller_spin)
        self.closed = False
        self.replaced = False
        self.former: tuple[Connection, ...] = ()
        self.drained = threading.Event()
        # Empty if the peer's process is not visible from here.
        self._process = (identity(peer_credentials(sock)[0]) or "") if self.shares_memory else ""
        self._moved = moved
        self._write_lock = threading.Lock()
        self._outbox: deque[tuple[list[Bytes], Sequence[int]]] = deque()
        self._shut_because = ""
        self._routes = itertools.count(1)

    def peer_is_dead(self) -> bool:
        """Return whether the peer's process is certainly gone: its memory is no longer mapped."""
        return bool(self._process) and not alive(self._process)

    def hung_up(self) -> bool:
        """Return whether the peer ended the connection, though earlier messages may not be read yet."""
        look = select.poll()
        try:
            look.register(self.sock, select.POLLRDHUP)
        except ValueError:
            return True  # the socket is closed
        return self.closed or bool(look.poll(0))

    @property
    def usable(self) -> bool:
        """Whether messages may be sent through this connection."""
        return not (self.closed or self.replaced)

    @property
    def in_transit(self) -> bool:
        """Whether the peer's kernel has not acknowledged bytes that were sent, for example because a link is cut.

        Bytes that the peer has no room for do not count. False where the system does not tell.
        """
        if self.shares_memory or self.closed:
            return False
        unacknowledged, unsent = array.array("i", [0]), array.array("i", [0])
        try:
            fcntl.ioctl(self.sock, termios.TIOCOUTQ, unacknowledged)
            fcntl.ioctl(self.sock, _UNSENT, unsent)
        except (OSError, ValueError):
            return False
        return unacknowledged[0] > unsent[0]

    def next_route(self) -> int:
        """Return a number for a new pair of addresses that sends through this connection."""
        return next(self._routes)

    # Writing

    def write(
        self, buffers: Sequence[Bytes], fds: Sequence[int], work: Work[object], pieces: Iterable[Bytes] = ()
    ) -> None:
        """Send the buffers without a copy, blocking until the kernel has them all; then each piece, once it is made.

        Raises:
            ConnectionLostError: the connection is over.
            CommunicationTimeoutError: the peer did not read them before the deadline of `work`.
            Exception: the error that `work` was failed with meanwhile.
        """
        if not self._write_lock.acquire(timeout=max(0.0, min(work.deadline - time.monotonic(), 1e6))):
            raise CommunicationTimeoutError(work.title, work.seconds)
        try:
            while not self._flush():
                self._await_room(work)
            self._write_all(itertools.chain((list(buffers),), ([piece] for piece in pieces)), fds, work)
        finally:
            self._write_lock.release()
        self._flush_leftovers()

    def _write_all(self, batches: Iterable[list[Bytes]], fds: Sequence[int], work: Work[object]) -> None:
        started = False
        try:
            for rest in batches:
                while rest:
                    if self._push(rest, fds):
                        started, fds = True, ()
                    else:
                        self._await_room(work)
        except BaseException:
            # A partial frame cannot be withdrawn.
            if started:
                self.shut("a message to it was given up halfway")
            raise

    def try_write(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Send `data` if the start of it can be sent without blocking; return whether it was sent or queued.

        Raises:
            ConnectionLostError: the connection is over.
        """
        if not self._write_lock.acquire(blocking=False):
            return False
        try:
            rest: list[Bytes] = [data]
            if self._outbox or not self._push(rest, fds):
                return False
            if rest:
                # Ahead of messages that other threads posted meanwhile.
                self._outbox.appendleft((rest, ()))
        finally:
            self._write_lock.release()
        self._flush_leftovers()
        return True

    def post(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send `data` now or as soon as there is room. Never blocks, and raises nothing if the connection is lost."""
        self._outbox.append(([data], fds))
        self._flush_leftovers()

    def _flush_leftovers(self) -> None:
        """Send the posted messages unless another thread writes now, which will; start a thread if that must wait."""
        while self._outbox and not self.closed and self._write_lock.acquire(blocking=False):
            try:
                if self._flush():
                    self._write_lock.release()
                    continue
                # The thread takes over the lock, and releases it when all is sent.
                threading.Thread(target=self._empty_outbox, name="rlinf-outbox", daemon=True).start()
            except BaseException as error:
                self._write_lock.release()
                # The reading thread reports a lost connection; RuntimeError: no thread starts at interpreter shutdown.
                if not isinstance(error, ConnectionLostError | RuntimeError):
                    raise
            return

    def _empty_outbox(self) -> None:
        poller = select.poll()
        poller.register(self.sock, select.POLLOUT)
        try:
            while not self._flush():
                poller.poll()
        except ConnectionLostError:
            return  # the reading thread reports the end of the connection
        finally:
            self._write_lock.release()
        self._flush_leftovers()

    def _flush(self) -> bool:
        """Send the posted messages; return whether all were sent. The caller holds the write lock."""
        while self._outbox:
            rest, fds = self._outbox[0]
            sent = self._push(rest, fds)
            if rest:
                if sent:
                    self._outbox[0] = (rest, ())
                return False
            self._outbox.popleft()
        return True

    def _push(self, buffers: list[Bytes], fds: Sequence[int]) -> bool:
        """Send as many leading bytes as there is room for, and remove them; return whether any were sent."""
        if self.closed:
            raise ConnectionLostError("the connection is closed")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else ()
        try:
            sent = self.sock.sendmsg(buffers[:_BUFFERS_PER_CALL], ancillary, _FLAGS)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLostError(_broken(error)) from error
        done, rest = 0, sent
        while done < len(buffers) and rest >= len(buffers[done]):
            rest -= len(buffers[done])
            done += 1
        del buffers[:done]
        if rest:
            buffers[0] = memoryview(buffers[0])[rest:]
            self._moved()
        return sent > 0

    def _await_room(self, work: Work[object]) -> None:
        """Wait until the socket is writable."""
        poller = select.poll()
        poller.register(self.sock, select.POLLOUT)
        while True:
            error = work.exception()
            remaining = work.deadline - time.monotonic()
            if error is None and remaining <= 0:
                error = CommunicationTimeoutError(
                    work.title, work.seconds, picture="the other side no longer reads: its process hangs"
                )
            if error is None and self.closed:
                error = ConnectionLostError("the connection is closed")
            if error is not None:
                raise error
            if poller.poll(min(remaining, _SLICE) * 1000):
                return

    # The end

    def reason_of(self, error: Exception) -> str:
        """Return why the connection is over, given the error that its reader raised."""
        if self._shut_because:
            return self._shut_because
        if isinstance(error, OSError):
            return _broken(error)
        return "it closed the connection" if isinstance(error, EOFError) else str(error)

    def shut(self, reason: str = "") -> None:
        """End the traffic at once, also for the reading thread; `close` closes the descriptors."""
        self._shut_because = self._shut_because or reason
        self.closed = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was shut down already

    def close(self) -> None:
        """End the connection and free its resources; called by the reading thread at the end."""
        self.shut()
        with self._write_lock:
            self.sock.close()
            self.reader.close()
            self.segments.clear()
            self._outbox.clear()
        self.drained.set()

    def abandon(self) -> None:
        """Close the descriptors in a forked child without notifying the peer."""
        self.closed = True
        self.sock.close()


def _broken(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{NO_ANSWER}: {reason}" if error.errno in _VANISHED else f"the connection broke: {reason}"
