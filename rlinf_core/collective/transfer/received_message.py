"""Received messages that are not decoded yet, and the receives that are posted for them."""

from __future__ import annotations

from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.memory.segment import BlockLease
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
    """

    __slots__ = ("buffer",)

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
