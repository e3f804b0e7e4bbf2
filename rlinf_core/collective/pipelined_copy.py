"""A large tensor on one host: its receiver copies the beginning out while its sender still copies the rest in.

Two copies, one after the other, are half as fast as one; two at a time, on two cores, nearly as fast. That serves
`recv_tensor` alone: whoever is given a view needs all of it. A frame goes ahead of the bytes, and a few words follow
each piece of them, so that waiting, deadlines and deaths are those of any message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from rlinf_core.collective.frame import Flag, Frame, FrameKind
from rlinf_core.collective.message import Message
from rlinf_core.collective.payload import PartKind, copy_bytes

_FILLED = struct.Struct("<Q")
_GIVEN_UP = (1 << 64) - 1


def growing_source(message: Message, piece: int) -> memoryview | None:
    """Return the bytes of a message whose body is worth being sent as it grows, piece by piece; else None."""
    if not message.flags & Flag.TENSOR or message.tag:
        return None
    (part,) = message.parts
    if part.kind != PartKind.HOST or part.nbytes < 2 * piece:
        return None
    return part.view()


def fill_by_pieces(target: memoryview, source: memoryview, piece: int) -> Iterator[int]:
    """Copy piece by piece; yields how many bytes are there after each."""
    size = source.nbytes
    for start in range(0, size, piece):
        end = min(size, start + piece)
        copy_bytes(target[start:end], source[start:end])
        yield end


def grown_frame(route: int, sequence: int, filled: int | None) -> Frame:
    """Say how many bytes of the message with this number are there; None: there will be no more."""
    head = _FILLED.pack(_GIVEN_UP if filled is None else filled)
    return Frame(FrameKind.GROWN, route=route, sequence=sequence, head=head)


def read_grown(frame: Frame) -> int | None:
    """Return what `grown_frame` says."""
    (filled,) = _FILLED.unpack(frame.head)
    return None if filled == _GIVEN_UP else filled
