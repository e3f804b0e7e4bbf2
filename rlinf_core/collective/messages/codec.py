"""The codec: from an object to a pickle stream and out-of-band parts, and back."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rlinf_core.collective.messages.payload import HostPart, Part
from rlinf_core.errors import PayloadError

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_FEW = 16
# (object, buffer callback) -> stream; for what plain pickle cannot name, such as classes of the main script.
FallbackDumps = Callable[[object, Callable[[pickle.PickleBuffer], object]], bytes]


@dataclass(slots=True)
class Encoded:
    """A pickled object: the pickle stream, and its out-of-band parts in the order in which the stream names them."""

    head: bytes
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(part.nbytes for part in self.parts)


def encode(obj: object, fallback: FallbackDumps | None = None) -> Encoded:
    """Return `obj` as a stream and parts; the parts are the object's own memory, nothing large is copied.

    `fallback` pickles what plain pickle cannot, or what it would only name as part of `__main__`, which is another
    script in another process.

    Raises:
        PayloadError: the object does not pickle, or holds a tensor whose memory was freed.
    """
    parts: list[Part] = []
    try:
        head = _dump(obj, parts)
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
        head = fallback(obj, lambda buffer: parts.append(HostPart(buffer.raw())))
    except Exception as error:
        raise _unpicklable(obj, error) from error
    return Encoded(head, parts)


def _dump(obj: object, parts: list[Part]) -> bytes:
    if "torch" not in sys.modules or _is_plain(obj):
        return pickle.dumps(obj, protocol=5, buffer_callback=lambda buffer: parts.append(HostPart(buffer.raw())))
    from rlinf_core.collective.messages.torch_payload import TorchPickler

    stream = io.BytesIO()
    TorchPickler(stream, parts).dump(obj)
    return stream.getvalue()


def _is_plain(obj: object) -> bool:
    """Return whether an object certainly holds no tensor, a check cheaper than pickling it."""
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
    """Return the object that `encode` took apart; its arrays and tensors are built on `buffers`.

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
    """Let numpy 1 unpickle the arrays of numpy 2, which names other modules: simulators may need the older one."""
    for name in ("numeric", "multiarray"):
        sys.modules[f"numpy._core.{name}"] = importlib.import_module(f"numpy.core.{name}")


def _loads(head: Any, buffers: Any) -> object:
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - the peer is authenticated
