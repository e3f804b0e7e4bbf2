"""Messages: the codec between an object and its parts, and the encoding of a body for one peer.

An object becomes a pickle stream and out-of-band parts; they travel inside the frame, after it, or in shared memory.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rlinf_core.collective.frame import (
    ALIGNMENT,
    Flag,
    Frame,
    FrameKind,
    HostPart,
    Part,
    SharedPlace,
    layout,
    private_memory,
)
from rlinf_core.collective.work import Work
from rlinf_core.errors import PayloadError

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_FEW = 16
# (object, `buffer_callback`, `reducer_override` or None) -> stream; pickles objects that plain pickle cannot name, such
# as classes of `__main__`.
FallbackDumps = Callable[
    [object, Callable[[pickle.PickleBuffer], object], Callable[[object], object] | None],
    bytes,
]


@dataclass(slots=True)
class Encoded:
    """A pickled object: the pickle stream, and its out-of-band parts in the order of reference by the stream."""

    head: bytes
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(part.nbytes for part in self.parts)


def encode(obj: object, fallback: FallbackDumps | None = None) -> Encoded:
    """Return `obj` as a pickle stream and parts; the parts are the object's own memory, so nothing large is copied.

    `fallback` pickles objects that plain pickle cannot, or can only by a name in `__main__`, which is another module
    in another process.

    Raises:
        PayloadError: the object does not pickle, or holds a tensor whose memory was freed.
    """
    parts: list[Part] = []
    try:
        head = _dump(obj, parts, None)
    except PayloadError:
        raise
    except Exception as error:
        if fallback is None:
            raise _unpicklable(obj, error) from error
    else:
        if fallback is None or b"__main__" not in head:
            return Encoded(head, parts)
    parts = []
    try:
        head = _dump(obj, parts, fallback)
    except PayloadError:
        raise
    except Exception as error:
        raise _unpicklable(obj, error) from error
    return Encoded(head, parts)


def _dump(obj: object, parts: list[Part], fallback: FallbackDumps | None) -> bytes:
    if "torch" not in sys.modules or _is_plain(obj):

        def keep(buffer: pickle.PickleBuffer) -> None:
            parts.append(HostPart(buffer.raw()))

        return pickle.dumps(obj, protocol=5, buffer_callback=keep) if fallback is None else fallback(obj, keep, None)
    from rlinf_core.collective.torch_payload import TensorReducer, TorchPickler

    tensors = TensorReducer(parts)
    if fallback is not None:
        return fallback(obj, tensors.keep, tensors.reduce)
    stream = io.BytesIO()
    TorchPickler(stream, tensors).dump(obj)
    return stream.getvalue()


def _is_plain(obj: object) -> bool:
    """Return whether an object certainly holds no tensor; cheaper than pickling it."""
    kind = type(obj)
    if kind is tuple or kind is list:
        items = cast("Sequence[object]", obj)
        return len(items) <= _FEW and _PLAIN.issuperset(map(type, items))
    if kind is dict:
        values = cast("dict[object, object]", obj)
        return (
            len(values) <= _FEW
            and _PLAIN.issuperset(map(type, values))
            and _PLAIN.issuperset(map(type, values.values()))
        )
    return kind in _PLAIN


def _unpicklable(obj: object, error: Exception) -> PayloadError:
    kind = type(obj)
    return PayloadError(
        f"an object of type `{kind.__module__}.{kind.__qualname__}` cannot be sent",
        why=f"it cannot be pickled: {type(error).__name__}: {error}",
        help="send plain data: tensors, arrays, numbers, text, and containers or dataclasses of them",
    )


def decode(head: bytes | bytearray | memoryview, buffers: Sequence[object]) -> object:
    """Return the object that `encode` encoded; its arrays and tensors are views of `buffers` where possible.

    Only for bytes of an authenticated peer: unpickling executes code that the sender chooses.

    Raises:
        PayloadError: the object cannot be rebuilt in this process.
    """
    try:
        try:
            return _loads(head, buffers)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("numpy._core"):
                raise
            _use_names_of_numpy_2()
            return _loads(head, buffers)
    except PayloadError:
        raise
    except Exception as error:
        raise PayloadError(
            "a received object cannot be rebuilt",
            why=f"{type(error).__name__}: {error}",
            help=f"the types that it holds must be importable by `{sys.executable}`",
        ) from error


def _use_names_of_numpy_2() -> None:
    """Let numpy 1, which simulators may need, unpickle arrays of numpy 2, whose pickles name other modules."""
    for name in ("numeric", "multiarray"):
        sys.modules[f"numpy._core.{name}"] = importlib.import_module(f"numpy.core.{name}")


def _loads(head: Any, buffers: Any) -> object:
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - the peer is authenticated


Bytes = bytes | bytearray | memoryview
_PADDING = bytes(ALIGNMENT)


@dataclass(slots=True)
class Message:
    """A message before its transport is chosen.

    Attributes:
        head: the pickle stream, or dtype and shape of a tensor.
        tag: 0 between workers; other numbers are services of an endpoint.
        key: bytes interpreted by the service.
        acknowledgement: the handle that finishes when a receive has taken the message; None if none is wanted.
        to: the incarnation of its only recipient; None if a relaunched peer may receive it, too.
        sizes: bytes of each part, also if an encoded body already holds the parts.
    """

    head: bytes
    parts: Sequence[Part] = ()
    flags: int = 0
    tag: int = 0
    key: bytes = b""
    weight: float = 0.0
    acknowledgement: Work[None] | None = None
    to: str | None = None
    sizes: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = [part.nbytes for part in self.parts]

    @classmethod
    def of(cls, encoded: Encoded, inline_limit: int, *, tag: int = 0, key: bytes = b"", weight: float = 0.0) -> Message:
        """Return a message that carries an encoded object; a long pickle stream travels like a part."""
        if len(encoded.head) <= inline_limit:
            return cls(encoded.head, encoded.parts, 0, tag, key, weight)
        parts = [HostPart(memoryview(encoded.head)), *encoded.parts]
        return cls(b"", parts, Flag.HEAD_IN_BODY, tag, key, weight)

    @property
    def body_size(self) -> int:
        return layout(self.sizes)[1] if self.sizes else 0

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


@dataclass(slots=True)
class EncodedBody:
    """The body of a message, encoded for one peer.

    Attributes:
        place: its place in shared memory, or None.
        buffers: the bytes that follow the frame on the socket.
        fds: the file descriptors that are passed with the frame.
        pieces: the bytes that announce the pieces of a growing body, each made when its piece is filled.
        undo: releases its memory if the frame could not be sent.
    """

    flags: int = 0
    place: SharedPlace | None = None
    buffers: list[Bytes] = field(default_factory=list[Bytes])
    size: int = 0
    fds: tuple[int, ...] = ()
    pieces: Iterable[bytes] = ()
    undo: Callable[[], None] = lambda: None


def inline_body(message: Message) -> EncodedBody:
    """Return a small body as one buffer after its frame."""
    size = message.body_size
    if not size:
        return EncodedBody()
    body = bytearray(size)
    message.gather(memoryview(body))
    return EncodedBody(buffers=[body], size=size)


def stream_body(message: Message) -> EncodedBody:
    """Return a body for another host. Its buffers are the parts themselves; only scattered parts are copied."""
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
