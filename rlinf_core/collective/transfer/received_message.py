"""Received messages that are not decoded yet, and posted receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from rlinf_core.collective.arena import BlockLease
from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.reading_turn import ReadingTurn
from rlinf_core.collective.messages.frame import Flag, Frame, layout
from rlinf_core.collective.messages.message import decode
from rlinf_core.collective.messages.payload import copy_bytes, private_memory
from rlinf_core.collective.messages.torch_payload import TensorTarget
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

    def _settle(self, value: object, error: BaseException | None) -> bool:
        settled = super()._settle(value, error)
        if settled and self.turn is not None:
            self.turn.settled(self)
        return settled

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
