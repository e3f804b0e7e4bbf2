"""A message that has arrived and was not yet opened: its frame, and where its body lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlinf_core.collective.codec import decode
from rlinf_core.collective.frame import Flag, Frame, layout
from rlinf_core.collective.growth import Growth
from rlinf_core.collective.payload import PartKind, copy_bytes, private_memory
from rlinf_core.collective.segment import BlockLease
from rlinf_core.collective.torch_payload import TensorTarget

# From a part that is a handle to device memory to the tensor of bytes that it stands for.
Adopt = Callable[[int, memoryview], object]


class ReceivedMessage:
    """One message as it lies here. It is opened once with `load`, handed on, or dropped with `release`.

    Attributes:
        frame: the message's frame.
        nbytes: what it weighs in memory of this process outside shared memory.
        growth: how much of its body is there, where its sender still writes it.
    """

    __slots__ = ("_body", "_lease", "frame", "growth", "nbytes")

    def __init__(
        self,
        frame: Frame,
        body: memoryview | None = None,
        lease: BlockLease | None = None,
        growth: Growth | None = None,
    ) -> None:
        self.frame = frame
        self.growth = growth
        self._body = body
        self._lease = lease
        self.nbytes = len(frame.head) + (body.nbytes if body is not None else 0)

    @property
    def lease(self) -> BlockLease | None:
        """The shared memory that the body lies in, if it does."""
        return self._lease

    @property
    def size(self) -> int:
        """Bytes of the message's head and parts."""
        return len(self.frame.head) + sum(self.frame.sizes)

    def parts(self, *, keep: bool) -> list[memoryview]:
        """Return the bytes of each part.

        With `keep` they may be kept and written for as long as anybody likes; without, only until `release`.
        """
        frame = self.frame
        if not frame.sizes:
            return []
        offsets, _ = layout(frame.sizes)
        whole = self._whole(keep)
        return [whole[offset : offset + size] for offset, size in zip(offsets, frame.sizes, strict=True)]

    def load(self, adopt: Adopt | None = None) -> object:
        """Return the object that was sent.

        Raises:
            PayloadError: it cannot be rebuilt in this process; the message is gone all the same.
        """
        try:
            buffers: list[memoryview] = self.parts(keep=True)
            head: bytes | bytearray | memoryview = self.frame.head
            if self.frame.flags & Flag.HEAD_IN_BODY:
                head = buffers[0]
                buffers = buffers[1:]
                kinds = self.frame.kinds[1:]
            else:
                kinds = self.frame.kinds
            return decode(head, adopted(kinds, buffers, adopt))
        finally:
            self._body = self._lease = None

    def fill(self, target: TensorTarget, adopt: Adopt | None = None) -> None:
        """Copy the one tensor that was sent into `target`."""
        try:
            if self.growth is not None:
                self._follow(self.growth, target)
                return
            (source,) = adopted(self.frame.kinds, self.parts(keep=False), adopt)
            target.fill(source)
        finally:
            self.release()

    def _follow(self, growth: Growth, target: TensorTarget) -> None:
        """Copy what is there, as it comes."""
        (source,) = self.parts(keep=False)
        into = target.view()
        done = 0
        while done < source.nbytes:
            there = growth.wait_beyond(done)
            if into is not None:
                copy_bytes(into[done:there], source[done:there])
            done = there
        if into is None:
            target.fill(source)

    def release(self) -> None:
        """Drop the message unopened."""
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
            # Who keeps what it receives must not fill the sender's memory.
            copy = private_memory(lease.size)
            copy_bytes(copy, lease.peek())
            lease.release()
            return copy
        return lease.view()


def adopted(kinds: Sequence[int], buffers: Sequence[memoryview], adopt: Adopt | None) -> Sequence[object]:
    """Return the buffers, with those that are handles to device memory replaced by what they stand for."""
    if adopt is None or not any(kinds):
        return buffers
    return [
        buffer if kind == PartKind.HOST else adopt(kind, buffer) for kind, buffer in zip(kinds, buffers, strict=True)
    ]
