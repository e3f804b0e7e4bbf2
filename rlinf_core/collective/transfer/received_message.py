"""Received messages that are not decoded yet, and the receives that are posted for them."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from rlinf_core.collective.arena import BlockLease
from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.messages.codec import decode
from rlinf_core.collective.messages.frame import Flag, Frame, layout
from rlinf_core.collective.messages.payload import copy_bytes, private_memory
from rlinf_core.collective.messages.torch_payload import TensorTarget
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import MismatchError
from rlinf_core.waiting import OperationKind


class ReceivedMessage:
    """A received message. It is decoded once with `load`, forwarded, or dropped with `release`.

    Attributes:
        frame: the message's frame.
        nbytes: the bytes that it takes of this process's own memory.
        connection: the connection that it came through; None within a process.
    """

    __slots__ = ("_body", "_lease", "connection", "frame", "nbytes")

    def __init__(self, frame: Frame, body: memoryview | None = None, lease: BlockLease | None = None) -> None:
        self.frame = frame
        self._body = body
        self._lease = lease
        self.connection: Connection | None = None
        self.nbytes = len(frame.head) + (body.nbytes if body is not None else 0)

    @property
    def lease(self) -> BlockLease | None:
        return self._lease

    @property
    def size(self) -> int:
        return len(self.frame.head) + sum(self.frame.sizes)

    def parts(self, *, keep: bool) -> list[memoryview]:
        """Return the bytes of each part.

        With `keep` they stay valid and writable; without, only until `release`.
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
            PayloadError: it cannot be rebuilt in this process; the message is consumed either way.
        """
        try:
            buffers: list[memoryview] = self.parts(keep=True)
            head: bytes | bytearray | memoryview = self.frame.head
            if self.frame.flags & Flag.HEAD_IN_BODY:
                head = buffers[0]
                buffers = buffers[1:]
            return decode(head, buffers)
        finally:
            self._body = self._lease = None

    def fill(self, target: TensorTarget) -> None:
        try:
            (source,) = self.parts(keep=False)
            target.fill(source)
        finally:
            self.release()

    def release(self) -> None:
        """Drop the message undecoded."""
        lease, self._lease, self._body = self._lease, None, None
        if lease is not None:
            lease.release()

    def take_lease(self) -> BlockLease | None:
        """Return the lease, which is the caller's from now on."""
        lease, self._lease = self._lease, None
        return lease

    def body(self) -> memoryview:
        """Return the whole body, until `release`."""
        return self._whole(keep=False)

    def _whole(self, keep: bool) -> memoryview:
        lease = self._lease
        if lease is None:
            return self._body if self._body is not None else memoryview(b"")
        if not keep:
            return lease.peek()
        if lease.segment.crowded() and not lease.private:
            # A receiver that keeps what it receives must not fill the sender's memory.
            copy = private_memory(lease.size)
            copy_bytes(copy, lease.peek())
            lease.release()
            return copy
        return lease.view()


class PostedReceive(Work[object]):
    """A receive that was issued; `buffer` is what `recv_tensor` fills, or None for `recv`.

    It decodes a `ReceivedMessage`, or None where the connection wrote the body straight into that buffer.

    Attributes:
        claim: its buffer, while a body is read into it.
    """

    __slots__ = ("_failing", "_lock", "buffer", "claim")

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
        self.claim: BufferClaim | None = None
        self._failing = False
        # Between who claims the buffer and who fails the receive: the first one decides.
        self._lock = threading.Lock()

    def claim_buffer(self, memory: memoryview) -> BufferClaim | None:
        """Return a claim to its buffer, this memory; None where it has failed."""
        with self._lock:
            if not self._failing:
                self.claim = BufferClaim(self, memory)
            return self.claim

    def fail(self, error: BaseException) -> bool:
        with self._lock:
            # Who hears of the failure has its buffer back. A body that is complete arrives at this moment.
            if self.claim is not None and not self.claim.give_up():
                return False
            self._failing = True
        return super().fail(error)


class BufferClaim:
    """The buffer of a receive, while a body is read straight into it.

    The receive may be given up meanwhile. From then on the buffer is its owner's alone: what it holds of the body is
    copied, and the rest is read behind that copy, so that the message is whole for the next receive.

    Attributes:
        given_up: whether the body is read into memory of its own.
    """

    def __init__(self, posted: PostedReceive, memory: memoryview) -> None:
        self.posted = posted
        self.given_up = False
        self._memory = memory
        self._size = memory.nbytes
        self._filled = 0
        self._lock = threading.Lock()

    @property
    def complete(self) -> bool:
        return self._filled == self._size

    @property
    def body(self) -> memoryview | None:
        """The body where it is a message of its own; None where the receive has it."""
        return self._memory if self.given_up else None

    def read(self, read_now: Callable[[memoryview], int]) -> int:
        """Have `read_now` fill what is missing, as far as it can without waiting; return the number of bytes.

        Raises:
            MemoryError: the receive was given up, and there was no memory for the body.
        """
        with self._lock:
            if not self._memory.nbytes:
                raise MemoryError(f"there is no memory for a message of {self._size} bytes whose receive was given up")
            count = read_now(self._memory[self._filled :])
            self._filled += count
            return count

    def give_up(self) -> bool:
        """Leave the buffer to its owner; return False where the body is complete, and the receive has it."""
        with self._lock:
            if not self.given_up:
                if self.complete:
                    return False
                self.given_up = True
                self._memory = self._copy()
            return True

    def _copy(self) -> memoryview:
        try:
            memory = private_memory(self._size)
        except (MemoryError, OSError):
            return memoryview(b"")
        copy_bytes(memory[: self._filled], self._memory[: self._filled])
        return memory


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


# The backlog: what has arrived and was not received yet. While it is too much, nothing more is read.


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
