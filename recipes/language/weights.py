"""Weights on their way from actors to engines: a header, pieces of some megabytes, and a fingerprint.

A receiver loads a piece while the next ones are on their way, and either side computes the fingerprint of a section
while that is in its processor's cache, so that a transfer takes little longer than copying the weights twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

from torch import Tensor

from recipes.language.engines.base import ArrivingPart, ArrivingTensors, Engine
from recipes.language.fingerprint import Fingerprint, sections
from recipes.training.weights import FlatWeights
from rlinf_core import ObservedTensor, RLinfError, Work

# Tensors travel together until they are so many bytes, a multiple of a fingerprint's blocks, and a larger one travels
# in parts. A message costs as much processor time as copying 4 MB: with pieces of 4 MB either side needs a fifth more
# of it.
_PIECE_BYTES = 16 << 20


class Place(NamedTuple):
    """The place of a part of a tensor in a piece.

    Attributes:
        name: of the tensor.
        first: element of the tensor that the part begins with; a multiple of the blocks of fingerprints.
        offset: element of the piece that it begins at.
        size: of elements.
    """

    name: str
    first: int
    offset: int
    size: int


class WeightHeader(NamedTuple):
    """The first message of an update. As many messages as `pieces` follow, each a tensor, and the fingerprint.

    Attributes:
        version: counts optimizer steps of training steps.
        shapes: of all tensors, by name.
        pieces: what lies where in each piece.
        adapter_only: whether they are those of a LoRA adapter.
    """

    version: int
    shapes: dict[str, tuple[int, ...]]
    pieces: tuple[tuple[Place, ...], ...]
    adapter_only: bool = False


class _Span(NamedTuple):
    """A part of a flat buffer, and what lies in it."""

    piece: Tensor
    places: tuple[Place, ...]


def messages(
    weights: FlatWeights, version: int, *, prefix: str = "", adapter_only: bool = False
) -> Iterator[WeightHeader | Tensor | ObservedTensor | str]:
    """Yield the messages of an update, which share the memory of `weights`; `prefix` is taken off the names.

    Each is to be sent before the next is asked for.
    """
    views = {name.removeprefix(prefix): view for name, view in weights.views.items()}
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    spans = [span for buffer in weights.buffers for span in _spans(views, buffer)]
    yield WeightHeader(version, shapes, tuple(each.places for each in spans), adapter_only)
    found = Fingerprint()
    for span in spans:
        yield _observed(span, shapes, found)
    yield found.text()


def _observed(span: _Span, shapes: Mapping[str, tuple[int, ...]], found: Fingerprint) -> Tensor | ObservedTensor:
    """Return a piece whose sections enter the fingerprint as they are sent, or now where they lie on a device."""
    piece = span.piece
    parts: list[tuple[Place, int, int]] = []
    for place in span.places:
        parts += [(place, begin, end) for begin, end in sections(place.size, piece.element_size())]

    def observe(number: int) -> None:
        place, begin, end = parts[number]
        values = piece[place.offset + begin : place.offset + end]
        found.add_part(place.name, shapes[place.name], place.first + begin, values)

    if piece.is_cpu:
        # A section lasts until the next one begins, or until the end: what aligns tensors lies between them.
        starts = [place.offset + begin for place, begin, _ in parts]
        return ObservedTensor(piece, [*starts[1:], piece.numel()], observe)
    for number in range(len(parts)):
        observe(number)
    return piece


def _spans(views: Mapping[str, Tensor], buffer: Tensor) -> Iterator[_Span]:
    """Yield the pieces of a buffer."""
    mine = {name: view for name, view in views.items() if view.dtype == buffer.dtype}
    most = _PIECE_BYTES // buffer.element_size()
    begin, end, begun = 0, 0, list[Place]()
    for name in sorted(mine, key=lambda name: mine[name].storage_offset()):
        start, size = int(mine[name].storage_offset()), mine[name].numel()
        for first in range(0, max(1, size), most):
            count = min(most, size - first)
            if begun and start + first + count - begin > most:
                yield _Span(buffer[begin:end], tuple(begun))
                begun = []
            if not begun:
                begin = start + first
            begun.append(Place(name, first, start + first - begin, count))
            end = start + first + count
    if begun:
        yield _Span(buffer[begin:end], tuple(begun))


class WeightUpdate:
    """Weights of a version that have arrived, or are still arriving.

    Args:
        header: of the update.
        pieces: wait for the tensors of the pieces, in their order; each is asked once.
        fingerprint: waits for that of the sender.
    """

    def __init__(self, header: WeightHeader, pieces: Iterator[Tensor], fingerprint: Callable[[], str]) -> None:
        self.version = header.version
        self._header = header
        self._pieces = pieces
        self._fingerprint = fingerprint

    def _parts(self) -> Iterator[ArrivingPart]:
        """Yield the parts of tensors as they arrive, once; they share memory with the pieces."""
        for places, piece in zip(self._header.pieces, self._pieces, strict=True):
            for name, first, offset, count in places:
                yield ArrivingPart(name, first, piece[offset : offset + count])

    def apply(self, engine: Engine) -> None:
        """Load the weights into an engine.

        Raises:
            RLinfError: the engine's fingerprint is another one.
        """
        header = self._header
        arriving = ArrivingTensors(header.shapes, self._parts())
        found = engine.load_weights(arriving, self.version, adapter_only=header.adapter_only)
        sent = self._fingerprint()
        if found != sent:
            raise RLinfError(
                f"the engine's weights of version {self.version} are not the actor's",
                why=f"their fingerprint is {found}, that of the actor's {sent}",
                help="model and precision of actor and rollout must be the same",
            )


class IncomingWeights:
    """An update on its way to this process.

    Args:
        receive: begins to receive the next message of the actor.
    """

    def __init__(self, receive: Callable[[], Work[object]]) -> None:
        self._receive = receive
        self._first = receive()
        self._begun: tuple[WeightHeader, list[Work[object]]] | None = None

    def done(self) -> bool:
        """Return whether all of it has arrived."""
        return (self._begun is not None or self._first.done()) and all(each.done() for each in self._begin()[1])

    def wait(self) -> WeightUpdate:
        """Return the update when it begins to arrive."""
        header, (*pieces, last) = self._begin()
        return WeightUpdate(header, _arrived(pieces), lambda: str(last.wait()))

    def _begin(self) -> tuple[WeightHeader, list[Work[object]]]:
        """Return the header, and what follows it; waits for the header."""
        if self._begun is None:
            header = cast("WeightHeader", self._first.wait())
            self._begun = header, [self._receive() for _ in range(len(header.pieces) + 1)]
        return self._begun


def _arrived(pieces: list[Work[object]]) -> Iterator[Tensor]:
    """Yield pieces in their order, and keep none, so that their memory serves those that follow."""
    while pieces:
        yield cast("Tensor", pieces.pop(0).wait())
