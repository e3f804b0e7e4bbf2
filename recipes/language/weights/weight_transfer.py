"""Weights on their way from actors to engines: a header, pieces of some megabytes, and a fingerprint.

A receiver loads a piece while the next ones are on their way, and either side reads the numbers of a piece while they
are in its processor's cache. A receiver without others beside it keeps the memory that they came in: the weights are
copied once, by their sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

from torch import Tensor

from recipes.language.engines.engine import ArrivingTensors, Engine
from recipes.language.models.fingerprint import Fingerprint
from recipes.training.weights.flat_weights import FlatWeights
from rlinf_core import RLinfError, Work

# Tensors travel together until they are so many bytes; a larger one travels alone. A message costs as much processor
# time as copying 4 MB: with pieces of 4 MB either side needs a fifth more of it.
PIECE_BYTES = 16 << 20


class Place(NamedTuple):
    """The place of a tensor in a piece: its name, its first element, its shape."""

    name: str
    offset: int
    shape: tuple[int, ...]


class WeightHeader(NamedTuple):
    """The first message of an update. As many messages as `pieces` follow, each a tensor, and the fingerprint.

    Attributes:
        version: counts optimizer steps of training steps.
        pieces: where the tensors of each piece lie in it.
        adapter_only: whether they are those of a LoRA adapter.
    """

    version: int
    pieces: tuple[tuple[Place, ...], ...]
    adapter_only: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        return {place.name: place.shape for piece in self.pieces for place in piece}


class _Span(NamedTuple):
    """A part of a flat buffer, and the weights in it."""

    buffer: Tensor
    places: tuple[Place, ...]
    views: tuple[Tensor, ...]


def messages(
    weights: FlatWeights, version: int, *, prefix: str = "", adapter_only: bool = False
) -> Iterator[WeightHeader | Tensor | str]:
    """Yield the messages of an update, which share the memory of `weights`; `prefix` is taken off the names."""
    spans = list(_spans({name.removeprefix(prefix): view for name, view in weights.views.items()}, weights.buffers))
    yield WeightHeader(version, tuple(span.places for span in spans), adapter_only)
    digest = Fingerprint()
    for span in spans:
        for place, view in zip(span.places, span.views, strict=True):
            digest.add(place.name, view)
        yield span.buffer
    yield digest.text()


def _spans(views: Mapping[str, Tensor], buffers: list[Tensor]) -> Iterator[_Span]:
    for buffer in buffers:
        mine = {name: view for name, view in views.items() if view.dtype == buffer.dtype}
        ordered = sorted(mine, key=lambda name: mine[name].storage_offset())
        begun: list[str] = []
        size = 0
        for name in ordered:
            if begun and size + mine[name].nbytes > PIECE_BYTES:
                yield _span(buffer, {name: mine[name] for name in begun})
                begun, size = [], 0
            begun.append(name)
            size += mine[name].nbytes
        if begun:
            yield _span(buffer, {name: mine[name] for name in begun})


def _span(buffer: Tensor, views: Mapping[str, Tensor]) -> _Span:
    first = min(int(view.storage_offset()) for view in views.values())
    last = max(int(view.storage_offset()) + view.numel() for view in views.values())
    places = tuple(Place(name, int(view.storage_offset()) - first, tuple(view.shape)) for name, view in views.items())
    return _Span(buffer[first:last], places, tuple(views.values()))


class WeightUpdate:
    """Weights of a version that have arrived, or are still arriving.

    Args:
        header: of the update.
        pieces: wait for the tensors of the pieces, in their order; each is asked once.
        fingerprint: waits for that of the sender.
        may_keep: see `ArrivingTensors`.
    """

    def __init__(
        self, header: WeightHeader, pieces: Iterator[Tensor], fingerprint: Callable[[], str], *, may_keep: bool = False
    ) -> None:
        self.version = header.version
        self._header = header
        self._pieces = pieces
        self._fingerprint = fingerprint
        self._may_keep = may_keep

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor by name as it arrives, once; they share memory with the pieces."""
        for places, piece in zip(self._header.pieces, self._pieces, strict=True):
            for place in places:
                count = 1
                for size in place.shape:
                    count *= size
                yield place.name, piece[place.offset : place.offset + count].view(place.shape)

    def apply(self, engine: Engine) -> None:
        """Load the weights into an engine.

        Raises:
            RLinfError: the engine's fingerprint is another one.
        """
        header = self._header
        arriving = ArrivingTensors(header.shapes, self.tensors(), may_keep=self._may_keep)
        loaded = engine.load_weights(arriving, self.version, adapter_only=header.adapter_only)
        sent = self._fingerprint()
        if loaded != sent:
            raise RLinfError(
                f"the engine's weights of version {self.version} differ from the actor's",
                why=f"their fingerprint is {loaded}, the actor's is {sent}",
                help="actor and rollout must have the same model and precision",
            )


class IncomingWeights:
    """An update on its way to this process.

    Args:
        receive: begins to receive the next message of the actor.
        may_keep: whether this is the only receiver of the messages, so that an engine may keep their memory. Where
            several do, what one of them keeps stays taken in the sender's shared memory.
    """

    def __init__(self, receive: Callable[[], Work[object]], *, may_keep: bool = False) -> None:
        self._receive = receive
        self._may_keep = may_keep
        self._first = receive()
        self._begun: tuple[WeightHeader, list[Work[object]]] | None = None

    def done(self) -> bool:
        """Return whether all of it has arrived."""
        return (self._begun is not None or self._first.done()) and all(transfer.done() for transfer in self._begin()[1])

    def wait(self) -> WeightUpdate:
        """Return the update when it begins to arrive."""
        header, (*pieces, last) = self._begin()
        return WeightUpdate(header, _arrived(pieces), lambda: str(last.wait()), may_keep=self._may_keep)

    def _begin(self) -> tuple[WeightHeader, list[Work[object]]]:
        """Wait for the header, and return it with the stream of pieces."""
        if self._begun is None:
            header = cast("WeightHeader", self._first.wait())
            self._begun = header, [self._receive() for _ in range(len(header.pieces) + 1)]
        return self._begun


def _arrived(pieces: list[Work[object]]) -> Iterator[Tensor]:
    """Yield pieces in order without keeping any, so that their memory is reused."""
    while pieces:
        yield cast("Tensor", pieces.pop(0).wait())
