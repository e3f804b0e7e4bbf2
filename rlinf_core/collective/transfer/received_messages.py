"""Received messages that are not decoded yet, posted receives, and the backlog.

The backlog is the messages that arrived and were not received yet. While there are too many, reading pauses.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial

from rlinf_core.collective.arena import BlockLease
from rlinf_core.collective.connection import Connection, ReadingTurn
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.frame import Flag, Frame, copy_bytes, layout, private_memory
from rlinf_core.collective.message import decode
from rlinf_core.collective.torch_payload import TensorTarget
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import MismatchError
from rlinf_core.waiting import OperationKind


class ReceivedMessage:
    """A received message. It is decoded once with `load`, forwarded, or dropped with `release`.

    Attributes:
        frame: the message's frame.
        lease: the lease of its body, where that lies in shared memory.
        nbytes: the bytes of this process's private memory that it takes.
        reserved: the bytes of its body that the backlog counts before the message is delivered.
        connection: the connection that it came through; None within a process.
    """

    __slots__ = ("_body", "connection", "frame", "lease", "nbytes", "reserved")

    def __init__(self, frame: Frame, body: memoryview | None = None, lease: BlockLease | None = None) -> None:
        self.frame = frame
        self._body = body
        self.lease = lease
        self.connection: Connection | None = None
        self.nbytes = len(frame.head) + (body.nbytes if body is not None else 0)
        self.reserved = 0

    @property
    def size(self) -> int:
        return len(self.frame.head) + sum(self.frame.sizes)

    def parts(self, *, keep: bool) -> list[memoryview]:
        """Return the bytes of each part.

        With `keep` they stay valid and writable; without, they are valid only until `release`.
        """
        frame = self.frame
        if not frame.sizes:
            return []
        offsets, _ = layout(frame.sizes)
        body = self._whole(keep)
        return [body[offset : offset + size] for offset, size in zip(offsets, frame.sizes, strict=True)]

    def load(self) -> object:
        """Return the object that was sent.

        Raises:
            PayloadError: the object cannot be rebuilt in this process; the message is consumed either way.
        """
        try:
            buffers: list[memoryview] = self.parts(keep=True)
            head: bytes | bytearray | memoryview = self.frame.head
            if self.frame.flags & Flag.HEAD_IN_BODY:
                head = buffers[0]
                buffers = buffers[1:]
            return decode(head, buffers)
        finally:
            self._body = self.lease = None

    def fill(self, target: TensorTarget) -> None:
        try:
            (source,) = self.parts(keep=False)
            target.fill(source)
        finally:
            self.release()

    def release(self) -> None:
        """Drop the message undecoded."""
        lease, self.lease, self._body = self.lease, None, None
        if lease is not None:
            lease.release()

    def take_lease(self) -> BlockLease | None:
        """Return the lease, which the caller owns from now on."""
        lease, self.lease = self.lease, None
        return lease

    def body(self) -> memoryview:
        """Return the whole body, valid until `release`."""
        return self._whole(keep=False)

    def _whole(self, keep: bool) -> memoryview:
        lease = self.lease
        if lease is None:
            return self._body if self._body is not None else memoryview(b"")
        if not keep:
            return lease.peek()
        if lease.segment.crowded() and not lease.private:
            # A receiver that keeps received objects must not exhaust the sender's memory.
            copy = private_memory(lease.size)
            copy_bytes(copy, lease.peek())
            lease.release()
            return copy
        return lease.view()


class PostedReceive(Work[object]):
    """A receive that was issued.

    It decodes a `ReceivedMessage`, or None if the connection read the body straight into `buffer`.

    It may be given up while a body is read there. Then the bytes read so far are copied and the rest is read into that
    copy: the caller has the buffer back, and the message stays whole for the next receive.

    Attributes:
        buffer: the buffer that `recv_tensor` fills; None for `recv`.
        given_up: whether it failed while a body was read for it, which then goes into other memory.
        turn: the turn to read the connection of its stream, if there was one when it was issued.
    """

    __slots__ = ("_failing", "_filled", "_lock", "_memory", "buffer", "given_up", "turn")

    def __init__(
        self,
        kind: OperationKind,
        source: str,
        seconds: float,
        waits: WaitTable | None = None,
        *,
        detached: bool = False,
        target: TensorTarget | None = None,
    ) -> None:
        def decode(received: ReceivedMessage | None) -> object:
            if target is None:
                return None if received is None else received.load()
            if received is not None:
                received.fill(target)
            return target.buffer

        super().__init__(kind, source, seconds, waits, detached=detached, decode=decode)
        self.buffer = target
        self.given_up = False
        self.turn: ReadingTurn | None = None
        self._failing = False
        # The memory that a body is read into, and the bytes read so far.
        self._memory: memoryview | None = None
        self._filled = 0
        # Serializes the thread that reads into the buffer and a thread that fails the receive.
        self._lock = threading.Lock()

    def claim(self, memory: memoryview) -> bool:
        """Record that a body is read into `memory` (its buffer) until `let_go`; return False if the receive failed."""
        with self._lock:
            if not self._failing:
                self._memory, self._filled = memory, 0
            return not self._failing

    def let_go(self) -> memoryview | None:
        """End the reading; return the body if the receive was given up, else None."""
        memory, self._memory = self._memory, None
        return memory if self.given_up else None

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read."""
        return self.buffer is not None and self._filled == self.buffer.nbytes

    def read(self, read_now: Callable[[memoryview], int]) -> int:
        """Fill the missing part with `read_now`, as far as possible without waiting; return the number of bytes.

        Raises:
            MemoryError: the receive was given up, and there was no memory for the body.
        """
        with self._lock:
            if not self._memory:
                size = 0 if self.buffer is None else self.buffer.nbytes
                raise MemoryError(f"there is no memory for a message of {size} bytes whose receive was given up")
            count = read_now(self._memory[self._filled :])
            self._filled += count
            return count

    def _sleep_until(self, deadline: float) -> bool:
        sleep = partial(super()._sleep_until, deadline)
        return sleep() if self.turn is None else self.turn.wait(self, deadline, sleep)

    def fail(self, error: BaseException) -> bool:
        with self._lock:
            # The caller gets its buffer back with the failure. If the body is complete, the receive succeeds instead.
            if self._memory is not None and not self.given_up:
                if self.complete:
                    return False
                self.given_up = True
                self._memory = _copy(self._memory, self._filled)
            self._failing = True
        return super().fail(error)


def _copy(memory: memoryview, filled: int) -> memoryview:
    """Return new memory of the same size with a copy of the filled part; empty memory if there is none left."""
    try:
        copy = private_memory(memory.nbytes)
    except (MemoryError, OSError):
        return memoryview(b"")
    copy_bytes(copy[:filled], memory[:filled])
    return copy


def fits(dtype: str, nbytes: int, dtype_and_shape: str, size: int) -> bool:
    # The last bracket opens the shape; a dtype may hold others, as in `<M8[s]`.
    return nbytes == size and dtype_and_shape.rpartition("[")[0] == dtype


def find_mismatch(posted: PostedReceive, received: ReceivedMessage, where: str) -> MismatchError | None:
    """Return why a message does not fit a receive, or None when it does."""
    frame, target = received.frame, posted.buffer
    is_tensor = bool(frame.flags & Flag.TENSOR)
    sent = bytes(frame.head).decode() if is_tensor else "an object with `send`"
    if target is None:
        if not is_tensor:
            return None
        return MismatchError(
            f"{sent} with `send_tensor`", "an object: it called `recv`", where=where, help="pair it with `recv_tensor`"
        )
    if not is_tensor:
        return MismatchError(sent, f"{target}: it called `recv_tensor`", where=where, help="pair `send` with `recv`")
    if fits(target.dtype, target.nbytes, sent, frame.sizes[0]):
        return None
    return MismatchError(sent, str(target), where=where, help="size and dtype of both buffers must be the same")


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
