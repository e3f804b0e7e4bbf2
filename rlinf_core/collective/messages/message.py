"""Messages, and their bodies as they are encoded for one peer: inside the frame, behind it, or in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlinf_core.collective.messages.codec import Encoded
from rlinf_core.collective.messages.frame import ALIGNMENT, Flag, Frame, FrameKind, SharedPlace, layout
from rlinf_core.collective.messages.payload import HostPart, Part, private_memory
from rlinf_core.collective.work import Work

Bytes = bytes | bytearray | memoryview
_PADDING = bytes(ALIGNMENT)


@dataclass(slots=True)
class Message:
    """A message before its transport is chosen.

    Attributes:
        head: the pickle stream, or dtype and shape of a tensor.
        tag: 0 between workers; other numbers are services of an endpoint.
        key: bytes interpreted by the service.
        acknowledgement: finishes when a receive has taken it; None where nobody wants to know.
        to: the one endpoint that it is for; None where it is also for a successor.
    """

    head: bytes
    parts: Sequence[Part] = ()
    flags: int = 0
    tag: int = 0
    key: bytes = b""
    weight: float = 0.0
    acknowledgement: Work[None] | None = None
    to: str | None = None

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
        return layout(self.sizes)[1] if self.parts else 0

    def gather(self, target: memoryview) -> None:
        offsets, _ = layout(self.sizes)
        for part, offset in zip(self.parts, offsets, strict=True):
            part.copy_into(target[offset : offset + part.nbytes])

    def frame(self, route: int, sequence: int, body: EncodedBody) -> Frame:
        return Frame(
            FrameKind.MESSAGE,
            self.flags | body.flags | (0 if self.acknowledgement is None else Flag.ACKNOWLEDGE),
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


def do_nothing() -> None:
    """Undo nothing."""


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
    undo: Callable[[], None] = do_nothing


class PlaceholderPart(HostPart):
    """A part whose bytes are in the encoded body already."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(memoryview(b""))
        self.nbytes = nbytes


def inline_body(message: Message) -> EncodedBody:
    """Return a small body, as bytes behind its frame."""
    size = message.body_size
    if not size:
        return EncodedBody()
    body = bytearray(size)
    message.gather(memoryview(body))
    return EncodedBody(buffers=[body], size=size)


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
