"""The seam between a message and the ways in which its body can travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlinf_core.collective.frame import Flag, Frame, SharedPlace, layout
from rlinf_core.collective.payload import Encoded, HostPart, Part
from rlinf_core.collective.work import Work

Bytes = bytes | bytearray | memoryview


@dataclass(slots=True)
class Message:
    """A message before its transport is chosen.

    Attributes:
        head: the pickle stream, or dtype and shape of a tensor.
        parts: the out-of-band parts.
        flags: what the receiver must know, whatever the way.
        tag: 0 between workers; other numbers are services of an endpoint.
        key: words of the service's own.
        weight: of the item, for channels.
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
        """Write the body to `target`."""
        offsets, _ = layout(self.sizes)
        for part, offset in zip(self.parts, offsets, strict=True):
            part.copy_into(target[offset : offset + part.nbytes])

    def frame(self, kind: int, route: int, sequence: int, cargo: EncodedBody) -> Frame:
        """Return the frame that announces this message, travelling as `cargo`."""
        return Frame(
            kind,
            self.flags | cargo.flags,
            self.tag,
            route,
            sequence,
            self.weight,
            self.key,
            self.head,
            self.sizes,
            [part.kind for part in self.parts],
            cargo.place,
            cargo.body_size,
        )


def _nothing() -> None:
    return


@dataclass(slots=True)
class EncodedBody:
    """A message's body, made ready for one peer.

    Attributes:
        flags: how the receiver finds it.
        place: where in shared memory it lies, if it does.
        body: what follows the frame in the stream.
        body_size: bytes of the body.
        fds: descriptors that go with the frame.
        undo: gives memory back when the frame could not be sent.
    """

    flags: int = 0
    place: SharedPlace | None = None
    body: list[Bytes] = field(default_factory=list[Bytes])
    body_size: int = 0
    fds: tuple[int, ...] = ()
    undo: Callable[[], None] = _nothing


class HostTransport(ABC):
    """A way for bodies that are, or can be brought, into host memory."""

    @abstractmethod
    def load(self, message: Message, work: Work[object]) -> EncodedBody:
        """Make the body ready, waiting for room where there is none until `work`'s deadline.

        Raises:
            CommunicationTimeoutError: no room became free.
            PayloadError: there is no memory for it.
        """


class PlaceholderPart(HostPart):
    """A part whose bytes lie in the cargo already."""

    def __init__(self, nbytes: int, kind: int) -> None:
        super().__init__(memoryview(b""), kind)
        self.nbytes = nbytes


def inline(message: Message) -> EncodedBody:
    """Return a small body, as bytes behind its frame."""
    size = message.body_size
    body = bytearray(size)
    message.gather(memoryview(body))
    return EncodedBody(body=[body] if size else [], body_size=size)
