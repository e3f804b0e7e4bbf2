"""The wire format: one frame per message, a fixed header, then what it announces.

    header | part sizes | shared-memory descriptor | key | head | body

`head` is the pickle-5 stream of an object (or, for a tensor, its dtype and shape in words). `body` holds the
out-of-band parts, each at a multiple of 64 bytes; it follows in the stream, or lies in shared memory, and then the
descriptor says where.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from rlinf_core.errors import RuntimeFailure

VERSION = 1
_MAGIC = 0x4672
# magic, version, kind, flags, tag, route, parts, sequence, weight, key size, head size, body size
HEADER = struct.Struct("<HBBHHIIQdIIQ")
_DESCRIPTOR = struct.Struct("<QQQI")
_SIZE = struct.Struct("<Q")
ALIGNMENT = 64
# Far above what any frame needs: whoever exceeds it does not speak this protocol.
_LARGEST_PREFIX = 1 << 30
_SIZE_BITS = 56
_SIZE_MASK = (1 << _SIZE_BITS) - 1


class FrameKind(IntEnum):
    """The purpose of a frame."""

    ROUTE = 1
    MESSAGE = 2
    ACCEPTED = 3
    REFUSED = 4
    GOODBYE = 5
    FORGET = 6  # nothing more will lie in that shared memory, whose owner is gone
    GROWN = 7  # more of a body is there


class Flag:
    """Bits that say how a frame is read. Plain numbers: those of `enum` take longer than all else about a frame."""

    SHARED: Final = 1  # the body lies in shared memory
    DESCRIPTOR_FOLLOWS: Final = 2  # the file descriptor of that memory comes with this frame
    HEAD_IN_BODY: Final = 4  # the head is the first part
    TENSOR: Final = 8  # sent by send_tensor
    PRIVATE_COPY: Final = 16  # several receivers share the body: map it copy-on-write
    ACKNOWLEDGE: Final = 32  # the sender waits to hear whether it fitted
    ONE_SHOT: Final = 64  # that memory holds this body only
    GROWING: Final = 128  # the body is still being written; GROWN frames say how far it has come


class FrameError(RuntimeFailure):
    """The other side sent what is no frame of this version."""


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """The place of a body in shared memory.

    Attributes:
        segment: names the memory among all of the sender's host.
        offset: bytes from the segment's start.
        size: bytes, with the padding at the end.
        lease: the index of the flag by which the receiver gives it back.
    """

    segment: int
    offset: int
    size: int
    lease: int


@dataclass(slots=True)
class Frame:
    """One frame without its body.

    Attributes:
        kind: what it is for.
        flags: how its body travels.
        tag: what the message is for: 0 between workers, other numbers are services of an endpoint.
        route: which sender and receiver within the connection.
        sequence: counts the messages of a route from 1.
        weight: of the item, for channels.
        key: of the queue, for channels, or words of a service's own.
        head: the pickle stream, or dtype and shape.
        sizes: bytes of each part.
        kinds: what each part is, see `payload.PartKind`.
        place: where the body lies, if in shared memory.
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
    kinds: Sequence[int] = ()
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
            table = [size | kind << _SIZE_BITS for size, kind in zip(self.sizes, self.kinds, strict=True)]
            pieces.append(struct.pack(f"<{len(table)}Q", *table))
        if self.place is not None:
            place = self.place
            pieces.append(_DESCRIPTOR.pack(place.segment, place.offset, place.size, place.lease))
        pieces.append(self.key)
        pieces.append(self.head)
        return b"".join(pieces)


def pack_message(tag: int, route: int, key: bytes, head: bytes | bytearray, weight: float) -> bytes:
    """Return a message without a body, for the many small ones."""
    return (
        HEADER.pack(_MAGIC, VERSION, FrameKind.MESSAGE, 0, tag, route, 0, 0, weight, len(key), len(head), 0)
        + key
        + head
    )


def unpack(buffer: memoryview | bytes, start: int, available: int) -> tuple[Frame | None, int]:
    """Return the frame that begins at `start`, without its body, and its size in bytes.

    There is no frame yet when fewer bytes are `available`, of which there must be at least HEADER.size.

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
    kinds: tuple[int, ...] = ()
    if parts:
        table: tuple[int, ...] = struct.unpack_from(f"<{parts}Q", buffer, at)
        sizes = tuple(entry & _SIZE_MASK for entry in table)
        kinds = tuple(entry >> _SIZE_BITS for entry in table)
        at += parts * _SIZE.size
    place = None
    if flags & Flag.SHARED:
        place = SharedPlace(*_DESCRIPTOR.unpack_from(buffer, at))
        at += _DESCRIPTOR.size
    key = bytes(buffer[at : at + key_size]) if key_size else b""
    at += key_size
    head = bytes(buffer[at : at + head_size]) if head_size else b""
    return Frame(kind, flags, tag, route, sequence, weight, key, head, sizes, kinds, place, body), size


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each part begins within a body, and the body's size."""
    offsets: list[int] = []
    at = 0
    for size in sizes:
        at = (at + ALIGNMENT - 1) & -ALIGNMENT
        offsets.append(at)
        at += size
    return offsets, at
