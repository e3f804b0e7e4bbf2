"""The frame: the unit of the wire protocol, one for each message; its parts, and the reader that parses frames.

    header | part sizes | shared-memory descriptor | key | head | body

`head` is the pickle-5 stream of an object (or, for a tensor, its dtype and shape as text). `body` holds the
out-of-band parts, each at a multiple of 64 bytes. It follows the frame in the stream, or lies in shared memory, at the
place that the descriptor names.
"""

from __future__ import annotations

import array
import ctypes
import errno
import mmap
import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

from rlinf_core.errors import RuntimeFailure
from rlinf_core.waiting import spin

_CHUNK = 1 << 20
# Larger, since other threads run during an unlocked copy, and retaking the interpreter's lock may take milliseconds.
_UNLOCKED_CHUNK = 64 << 20
_HUGE_PAGE = 2 << 20


class Part(ABC):
    """Bytes that are sent beside the pickle stream."""

    nbytes: int

    @abstractmethod
    def view(self) -> memoryview | None:
        """Return the bytes without a copy, or None if they are not contiguous in host memory."""

    @abstractmethod
    def copy_into(self, target: memoryview) -> None:
        """Write the bytes to `target`, which has exactly `nbytes`."""


class HostPart(Part):
    """Contiguous bytes in this process's memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.nbytes = data.nbytes

    def view(self) -> memoryview:
        return self._data

    def copy_into(self, target: memoryview) -> None:
        copy_bytes(target, self._data)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy flat bytes while other threads of this process run.

    Writable memory is copied by ctypes without the interpreter's lock. ctypes gives no address for read-only memory,
    which is copied in pieces so that other threads run in between.
    """
    size = source.nbytes
    if size <= _CHUNK:
        target[:size] = source
    elif source.readonly:
        for start in range(0, size, _CHUNK):
            target[start : start + _CHUNK] = source[start : start + _CHUNK]
    else:
        # `from_buffer` raises if `target` is too small, as a slice assignment does.
        there, here = ((ctypes.c_char * size).from_buffer(view) for view in (target, source))
        for start in range(0, size, _UNLOCKED_CHUNK):
            length = min(_UNLOCKED_CHUNK, size - start)
            ctypes.memmove(ctypes.addressof(there) + start, ctypes.addressof(here) + start, length)


def private_memory(size: int) -> memoryview:
    """Return fresh writable memory of this process."""
    if size < _HUGE_PAGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


VERSION = 3
_MAGIC = 0x4672
# magic, version, kind, flags, tag, route, parts, sequence, weight, key size, head size, body size
HEADER = struct.Struct("<HBBHHIIQdIIQ")
_DESCRIPTOR = struct.Struct("<QQQI")
_SIZE = struct.Struct("<Q")
ALIGNMENT = 64
# The bytes of a growing body that are announced together.
PIECE = 4 << 20
# The most bytes of a frame without its body, far above what any frame needs.
_LARGEST_PREFIX = 1 << 30


class FrameKind(IntEnum):
    """The kind of a frame."""

    ROUTE = 1
    MESSAGE = 2
    ACCEPTED = 3
    REFUSED = 4
    GOODBYE = 5
    FORGET = 6  # the owner of a shared segment is gone: no further frame refers to it


class Flag:
    """The flags of a frame. Plain numbers: flags of `enum` would take longer than the rest of the work on a frame."""

    SHARED: Final = 1  # the body lies in shared memory
    DESCRIPTOR_FOLLOWS: Final = 2  # the file descriptor of that memory comes with this frame
    HEAD_IN_BODY: Final = 4  # the head is the first part
    TENSOR: Final = 8  # sent by send_tensor
    PRIVATE_COPY: Final = 16  # several receivers share the body: map it copy-on-write
    ACKNOWLEDGE: Final = 32  # the sender wants to know whether a receive took the message
    ONE_SHOT: Final = 64  # the shared segment holds only this body
    GROWING: Final = 128  # the sender still fills the shared body: one byte follows for each `PIECE` of it


class FrameError(RuntimeFailure):
    """An error for received bytes that are not a valid frame of this version."""


class SharedPlace(NamedTuple):
    """The place of a body in shared memory, in bytes; `lease` is the index of the lease that the receiver releases."""

    segment: int
    offset: int
    size: int
    lease: int


@dataclass(slots=True)
class Frame:
    """One frame without its body.

    Attributes:
        tag: 0 between workers; other numbers are services of an endpoint.
        route: the number of a pair of addresses, sender and receiver, within the connection.
        sequence: the number of the message in its stream, from 1.
        key: the key of a channel's queue, or bytes interpreted by the service.
        head: the pickle stream, or dtype and shape.
        sizes: bytes of each part.
        body_size: bytes of the body, with the padding between its parts.
    """

    kind: int
    flags: int = 0
    tag: int = 0
    route: int = 0
    sequence: int = 0
    weight: float = 0.0
    key: bytes = b""
    head: bytes = b""
    sizes: Sequence[int] = ()
    place: SharedPlace | None = None
    body_size: int = 0

    def pack(self) -> bytes:
        """Return the frame up to its body."""
        pieces = [
            HEADER.pack(
                _MAGIC,
                VERSION,
                self.kind,
                self.flags,
                self.tag,
                self.route,
                len(self.sizes),
                self.sequence,
                self.weight,
                len(self.key),
                len(self.head),
                self.body_size,
            )
        ]
        if self.sizes:
            pieces.append(struct.pack(f"<{len(self.sizes)}Q", *self.sizes))
        if self.place is not None:
            pieces.append(_DESCRIPTOR.pack(*self.place))
        pieces.append(self.key)
        pieces.append(self.head)
        return b"".join(pieces)


def pack_message(tag: int, route: int, key: bytes, head: bytes | bytearray, weight: float) -> bytes:
    """Return the frame of a message without a body: the fast path of small messages."""
    return (
        HEADER.pack(_MAGIC, VERSION, FrameKind.MESSAGE, 0, tag, route, 0, 0, weight, len(key), len(head), 0)
        + key
        + head
    )


def unpack(buffer: memoryview | bytes, start: int, available: int) -> tuple[Frame | None, int]:
    """Return the frame that begins at `start`, without its body, and its size in bytes.

    The frame is None while fewer bytes are `available`; at least HEADER.size bytes must be.

    Raises:
        FrameError: no frame of this version begins there.
    """
    magic, version, kind, flags, tag, route, parts, sequence, weight, key_size, head_size, body = HEADER.unpack_from(
        buffer, start
    )
    if magic != _MAGIC or version != VERSION:
        raise FrameError(f"the other side does not speak version {VERSION} of the data plane")
    size = HEADER.size + key_size + head_size
    if parts or flags & Flag.SHARED:
        size += parts * _SIZE.size + (_DESCRIPTOR.size if flags & Flag.SHARED else 0)
    if size > available:
        if size > _LARGEST_PREFIX:
            raise FrameError(f"the other side announces a frame head of {size} bytes")
        return None, size
    at = start + HEADER.size
    sizes: tuple[int, ...] = ()
    if parts:
        sizes = struct.unpack_from(f"<{parts}Q", buffer, at)
        at += parts * _SIZE.size
    place = None
    if flags & Flag.SHARED:
        place = SharedPlace(*_DESCRIPTOR.unpack_from(buffer, at))
        at += _DESCRIPTOR.size
    key = bytes(buffer[at : at + key_size]) if key_size else b""
    at += key_size
    head = bytes(buffer[at : at + head_size]) if head_size else b""
    return Frame(kind, flags, tag, route, sequence, weight, key, head, sizes, place, body), size


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each part within a body, and the body's size."""
    offsets: list[int] = []
    at = 0
    for size in sizes:
        at = (at + ALIGNMENT - 1) & -ALIGNMENT
        offsets.append(at)
        at += size
    return offsets, at


_BUFFER = 64 << 10
_FDS_PER_MESSAGE = 2
_ANCILLARY = socket.CMSG_SPACE(_FDS_PER_MESSAGE * array.array("i").itemsize) * 4
# A plain number: a flag of `enum` would take longer than the rest of the work on a frame.
_TRUNCATED = int(socket.MSG_CTRUNC)


class FrameReader:
    """A reader of frames from a stream socket; it blocks until they have arrived.

    Reading raises EOFError once the peer has closed the connection, and OSError when the connection breaks.

    Args:
        spin_seconds: how long it polls for the next frame before it blocks.
    """

    def __init__(self, sock: socket.socket, spin_seconds: float = 0.0) -> None:
        self._sock = sock
        self._spin_seconds = spin_seconds
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._takes_fds = sock.family == socket.AF_UNIX
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._need = HEADER.size
        self._fds: deque[int] = deque()

    def read(self) -> Frame:
        """Return the next frame. A body outside of shared memory follows: read it with `read_body` or `read_now`.

        Raises:
            FrameError: the bytes are not a frame.
        """
        while (frame := self.peek()) is None:
            if not (self._spin_seconds and spin(partial(self._poller.poll, 0), self._spin_seconds)):
                # A thread that blocks in a read is also woken, for nothing, when the peer reads what was sent to it.
                self._poller.poll()
            self.receive()
        self.skip()
        return frame

    def peek(self) -> Frame | None:
        """Return the next frame, without its body, if it has arrived; `skip` must follow before that is read."""
        available = self._end - self._start
        self._need = HEADER.size
        if available < HEADER.size:
            return None
        frame, self._need = unpack(self._view, self._start, available)
        return frame

    def skip(self) -> None:
        """Step past the frame that `peek` returned, to its body."""
        self._start += self._need

    def has_body(self, size: int) -> bool:
        """Return whether the body of the frame that `peek` returned has arrived too; if not, `receive` continues it."""
        if self._end - self._start >= self._need + size:
            return True
        self._need += size
        return False

    @property
    def empty(self) -> bool:
        """Whether all that was received has been read."""
        return self._start == self._end

    def read_body(self, body: memoryview, moved: Callable[[], None]) -> None:
        """Fill `body` with the bytes that follow; `moved` is called after each read from the socket."""
        size = body.nbytes
        filled = min(size, self._end - self._start)
        body[:filled] = self._view[self._start : self._start + filled]
        self._start += filled
        while filled < size:
            # On a unix socket, too, a body never comes together with descriptors.
            count = self._sock.recv_into(body[filled:])
            if not count:
                raise EOFError
            filled += count
            moved()

    def read_now(self, body: memoryview) -> int:
        """Fill the start of `body` with the bytes that have arrived; return their number."""
        count = min(body.nbytes, self._end - self._start)
        if count:
            body[:count] = self._view[self._start : self._start + count]
            self._start += count
            return count
        try:
            count = self._sock.recv_into(body, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if not count:
            raise EOFError
        return count

    def await_bytes(self, seconds: float | None = None) -> bool:
        """Wait until `receive` can return at once, at most `seconds`; return whether it can."""
        return bool(self._poller.poll(None if seconds is None else seconds * 1000))

    def take_fd(self) -> int:
        """Return the next file descriptor that came with the frames.

        Raises:
            EOFError: a frame announced a descriptor that did not arrive.
        """
        if not self._fds:
            raise EOFError("a file descriptor that a frame announces did not arrive")
        return self._fds.popleft()

    def close(self) -> None:
        """Close the file descriptors that were not taken."""
        while self._fds:
            os.close(self._fds.popleft())

    def receive(self) -> None:
        """Read once from the socket, with room for what is missing of the next frame."""
        self._make_room(self._need)
        space = self._view[self._end :]
        if not self._takes_fds:
            count = self._sock.recv_into(space)
        else:
            count, ancillary, flags, _ = self._sock.recvmsg_into([space], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                    self._fds.extend(fds)
            if flags & _TRUNCATED:
                raise OSError(errno.EMFILE, "this process has no file descriptor left for one that was passed to it")
        if not count:
            raise EOFError
        self._end += count

    def _make_room(self, need: int) -> None:
        start, rest = self._start, self._end - self._start
        if rest and start + need <= len(self._buffer) and len(self._buffer) - self._end >= _BUFFER // 4:
            return
        kept = bytes(self._view[start : self._end])
        if need > len(self._buffer):
            self._view.release()
            self._buffer = bytearray(need + _BUFFER)
            self._view = memoryview(self._buffer)
        self._view[:rest] = kept
        self._start, self._end = 0, rest
