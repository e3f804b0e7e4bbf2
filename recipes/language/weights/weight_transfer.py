"""Transfer of weights from actors to engines: a header, pieces of some megabytes, and a checksum.

A receiver loads a piece while the next ones arrive, and both sides compute the checksum of a piece while it is in the
processor's cache. A sole receiver keeps the received memory, so that only the sender copies the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

from torch import Tensor

from recipes.language.engines.engine import ArrivingTensors, Engine
from recipes.language.models.fingerprint import Fingerprint
from recipes.training.weights.weight_sync import Place, SentWeights
from rlinf_core import RLinfError, Work
from rlinf_core.collective.torch_payload import CustomCopy


class WeightHeader(NamedTuple):
    """The first message of an update. A message with a tensor follows for each of `pieces`, and then the checksum.

    Attributes:
        version: the version of the weights.
        pieces: the places of tensors in each piece.
        adapter_only: whether the tensors are only those of a LoRA adapter.
    """

    version: int
    pieces: tuple[tuple[Place, ...], ...]
    adapter_only: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        return {place.name: place.shape for piece in self.pieces for place in piece}


def messages(
    weights: SentWeights, version: int, *, prefix: str = "", adapter_only: bool = False
) -> Iterator[WeightHeader | CustomCopy | str]:
    """Yield the messages of an update, whose tensors may share the memory of `weights`; `prefix` is removed from names.
    Collective if `weights` are, see `SentWeights.tensors`.
    """
    pieces = tuple(
        tuple(place._replace(name=place.name.removeprefix(prefix)) for place in places) for places in weights.pieces
    )
    yield WeightHeader(version, pieces, adapter_only)
    digest = Fingerprint()
    for places, piece in zip(pieces, weights.tensors(), strict=True):
        yield CustomCopy(piece, partial(_copy_and_read, places, piece, digest))
        for place in places:
            # Tensors that were sent without a copy are not in the checksum yet.
            if place.name not in digest:
                digest.add(place.name, place.of(piece))
    yield digest.text()


def _copy_and_read(places: tuple[Place, ...], piece: Tensor, digest: Fingerprint, target: Tensor) -> None:
    for place in places:
        digest.add(place.name, place.of(piece), copy_to=place.of(target))


class WeightUpdate:
    """An update of weights that has arrived, or is arriving.

    Args:
        header: the header of the update.
        pieces: yields the tensors of the pieces in order, waiting for each.
        fingerprint: waits for the sender's checksum, and returns it.
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
                yield place.name, place.of(piece)

    def apply(self, engine: Engine) -> None:
        """Load the weights into an engine.

        Raises:
            RLinfError: the engine's checksum differs.
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
                code="weights-not-arrived",
            )


class IncomingWeights:
    """An update that this process is receiving.

    Args:
        receive: starts receiving the actor's next message.
        may_keep: whether this is the only receiver, so that an engine may keep the messages' memory. With several
            receivers, kept memory would stay occupied in the sender's shared memory.
    """

    def __init__(self, receive: Callable[[], Work[object]], *, may_keep: bool = False) -> None:
        self._receive = receive
        self._may_keep = may_keep
        self._first = receive()
        self._begun: tuple[WeightHeader, list[Work[object]]] | None = None

    def done(self) -> bool:
        """Return whether the whole update has arrived."""
        return (self._begun is not None or self._first.done()) and all(transfer.done() for transfer in self._begin()[1])

    def wait(self) -> WeightUpdate:
        """Wait for the header, and return the update."""
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
