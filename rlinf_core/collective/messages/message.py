"""Messages, and their bodies as they are encoded for one peer: inside the frame, behind it, or in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlinf_core.collective.messages.codec import Encoded
from rlinf_core.collective.messages.frame import ALIGNMENT, Flag, Frame, SharedPlace, layout
from rlinf_core.collective.messages.payload import HostPart, Part, private_memory

Bytes = bytes | bytearray | memoryview
_PADDING = bytes(ALIGNMENT)


@dataclass(slots=True)
class Message:
    """A message before its transport is chosen.

    Attributes:
        head: the pickle stream, or dtype and shape of a tensor.
        tag: 0 between workers; other numbers are services of an endpoint.
        key: bytes interpreted by the service.
    """

    head: bytes
    parts: Sequence[Part] = ()
    flags: int = 0
    tag: int = 0
    key: bytes = b""
    weight: float = 0.0

    @classmethod
    def of(cls, encoded: Encoded, inline_limit: int, *, tag: int = 0, key: bytes = b"", weight: float = 0.0) -> Message:
        """Return a message that carries an encoded object; a long pickle stream travels like a part."""
        if len(encoded.head) <= inline_limit:
            return cls(encoded.head, encoded.parts, 0, tag, key, weight)
        parts = [HostPart(memoryview(encoded.head)), *encoded.parts]
        return cls(b"", parts, Flag.HEAD_IN_BODY, tag, key, weight)

    @property
    def sizes(self) -> list[int]:
        return [part.nbytes for part in self.parts]

    @property
    def body_size(self) -> int:
        return layout(self.sizes)[1]

    def gather(self, target: memoryview) -> None:
        offsets, _ = layout(self.sizes)
        for part, offset in zip(self.parts, offsets, strict=True):
            part.copy_into(target[offset : offset + part.nbytes])

    def frame(self, kind: int, route: int, sequence: int, body: EncodedBody) -> Frame:
        return Frame(
            kind,
            self.flags | body.flags,
            self.tag,
            route,
            sequence,
            self.weight,
            self.key,
            self.head,
            self.sizes,
            body.place,
            body.size,
        )


def _nothing() -> None:
    return


@dataclass(slots=True)
class EncodedBody:
    """The body of a message, encoded for one peer.

    Attributes:
        place: its place in shared memory, or None.
        buffers: the bytes that follow the frame on the socket.
        fds: descriptors that are passed with the frame.
        undo: releases its memory when the frame could not be sent.
    """

    flags: int = 0
    place: SharedPlace | None = None
    buffers: list[Bytes] = field(default_factory=list[Bytes])
    size: int = 0
    fds: tuple[int, ...] = ()
    undo: Callable[[], None] = _nothing


class PlaceholderPart(HostPart):
    """A part whose bytes are in the encoded body already."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(memoryview(b""))
        self.nbytes = nbytes


def inline_body(message: Message) -> EncodedBody:
    """Return a small body, as bytes behind its frame."""
    size = message.body_size
    body = bytearray(size)
    message.gather(memoryview(body))
    return EncodedBody(buffers=[body] if size else [], size=size)


def stream_body(message: Message) -> EncodedBody:
    """Return a body for another host: it follows its frame, from where it lies; only scattered parts are copied."""
    buffers: list[Bytes] = []
    size = 0
    for part in message.parts:
        view = part.view()
        if view is None:
            view = private_memory(part.nbytes)
            part.copy_into(view)
        padding = -size % ALIGNMENT
        if padding:
            buffers.append(_PADDING[:padding])
        if part.nbytes:
            buffers.append(view)
        size += padding + part.nbytes
    return EncodedBody(buffers=buffers, size=size)
