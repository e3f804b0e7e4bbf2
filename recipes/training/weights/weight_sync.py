"""The transfer of weights from actors to rollout workers.

Weights are sent from contiguous buffers in pieces of some megabytes, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from recipes.training.tied_weights import names_of_one_tensor
from rlinf_core import RLinfError, Work, Worker

# Tensors travel together up to this many bytes; a larger one travels alone. A message costs as much processor time as
# copying 4 MB: with pieces of 4 MB, each side needs a fifth more.
PIECE_BYTES: Final = 16 << 20
# Every tensor begins at a multiple of this many elements, aligned for vector instructions.
ALIGNMENT: Final = 32


class Place(NamedTuple):
    """The place of a tensor in a piece: name, first element, and shape."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The element after its last one."""
        return self.offset + prod(self.shape)

    def of(self, piece: Tensor) -> Tensor:
        """Return the tensor, a view of the piece."""
        return piece[self.offset : self.end].view(self.shape)


class SentWeights(ABC):
    """The weights of a model on their way to rollout workers.

    Attributes:
        pieces: the places of the tensors in each piece.
    """

    pieces: tuple[tuple[Place, ...], ...]

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yield the pieces, [n] each. Collective: all ranks that share the weights iterate together."""


class GatheredWeights(SentWeights):
    """Weights whose shards are gathered a piece at a time.

    Args:
        weights: shards by name.
        types: the type in which floating-point weights are sent, one for all or by name; None: their own.
        full_tensor: gathers a shard's tensor; collective.
        onloaded: a context in which the shards are on their device.
    """

    def __init__(
        self,
        weights: Callable[[], Mapping[str, Tensor]],
        types: torch.dtype | Mapping[str, torch.dtype] | None,
        full_tensor: Callable[[Tensor], Tensor],
        onloaded: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._weights = weights
        self._full_tensor = full_tensor
        self._onloaded = onloaded
        self._types: dict[str, torch.dtype] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, weight in weights().items():
            wanted = types.get(name) if isinstance(types, Mapping) else types
            self._types[name] = wanted if wanted is not None and weight.is_floating_point() else weight.dtype
            shapes[name] = tuple(weight.shape)
        # By type, and else in the order of the model, so that the weights of a block are gathered together.
        ordered = sorted(shapes, key=lambda name: str(self._types[name]))
        sizes = {name: _aligned(prod(shapes[name])) for name in ordered}
        pieces = grouped(ordered, lambda name: self._types[name], sizes)
        self.pieces = tuple(tuple(_placed(names, shapes, sizes)) for names in pieces)

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        """See `SentWeights`; each piece has its own memory."""
        with self._onloaded():
            weights = self._weights()
            for places in self.pieces:
                yield self._gathered(places, weights)

    def _gathered(self, places: tuple[Place, ...], weights: Mapping[str, Tensor]) -> Tensor:
        last = places[-1]
        first = weights[last.name]
        piece = torch.zeros(last.end, dtype=self._types[last.name], device=first.device)
        for place in places:
            # Converted before it is gathered: a narrower type halves the bytes between ranks.
            place.of(piece).copy_(self._full_tensor(weights[place.name].detach().to(piece.dtype)))
        return piece


def grouped(
    names: Iterable[str], dtype: Callable[[str], torch.dtype], sizes: Mapping[str, int]
) -> Iterator[tuple[str, ...]]:
    """Yield names in groups of one type and up to `PIECE_BYTES` each.

    Args:
        names: the names, in their order.
        dtype: returns the type of a named tensor.
        sizes: the number of elements by name.
    """
    begun: list[str] = []
    size = 0
    for name in names:
        mine = sizes[name] * dtype(name).itemsize
        if begun and (dtype(begun[0]) != dtype(name) or size + mine > PIECE_BYTES):
            yield tuple(begun)
            begun, size = [], 0
        begun.append(name)
        size += mine
    if begun:
        yield tuple(begun)


def own_weights(module: nn.Module, chosen: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Return the weights of a module by name; shared weights go by their first name.

    Args:
        module: the owner.
        chosen: selects weights by name; None: all.
    """
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if chosen is not None:
        state = {name: tensor for name, tensor in state.items() if chosen(name)}
    return {name: state[name] for name in names_of_one_tensor(state)}


def _placed(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> Iterator[Place]:
    offset = 0
    for name in names:
        yield Place(name, offset, shapes[name])
        offset += sizes[name]


AboutT = TypeVar("AboutT")


class FirstPiece(NamedTuple, Generic[AboutT]):
    """The first message of an update, with its first piece. Each further message is the tensor of a piece.

    Attributes:
        about: further facts for the receiver, such as the version.
        pieces: see `SentWeights`.
        tensor: the first piece; None: there are no weights.
    """

    about: AboutT
    pieces: tuple[tuple[Place, ...], ...]
    tensor: Tensor | None


def piece_messages(
    weights: SentWeights, about: AboutT, *, copies: bool = False
) -> Iterator[FirstPiece[AboutT] | Tensor]:
    """Yield the messages of an update. Collective where `weights` are.

    Args:
        weights: the current weights.
        about: see `FirstPiece`.
        copies: whether the messages are copies on the host, which may be sent while training continues.
    """
    tensors = (piece.to("cpu", copy=copies) if copies else piece for piece in weights.tensors())
    yield FirstPiece(about, weights.pieces, next(tensors, None))
    yield from tensors


def _refuse(why: str) -> NoReturn:
    raise RLinfError(
        "the actor's policy and the rollout worker's differ",
        why=why,
        help="install the same versions of the policy's packages for both",
    )


def _refuse_unlike(name: str, theirs: Tensor, mine: Tensor) -> None:
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        _refuse(f"`{name}` is {list(theirs.shape)} of {theirs.dtype} and {list(mine.shape)} of {mine.dtype}")


def receiver_ranks(sender: int, senders: int, receivers: int) -> range:
    """Return the ranks of the rollout workers that get their weights from an actor."""
    return range(sender, receivers, senders)


class WeightSender:
    """Sends weights from one actor to its rollout workers.

    Args:
        worker: the actor.
        source: the actor's group and rank.
        group_name: the name of the group of the rollout workers.
        ranks: the ranks of the rollout workers that it serves.
        in_background: return before the messages are received, so that rollouts continue meanwhile.
    """

    def __init__(
        self, worker: Worker, source: tuple[str, int], group_name: str, ranks: range, *, in_background: bool
    ) -> None:
        self._worker = worker
        self._source = source
        self._groups = [(group_name, ranks)]
        self.in_background = in_background
        self._sending: list[Work[object]] = []

    def send(self, messages: Iterable[object]) -> None:
        """Send messages in order, one copy of each for all workers of a host.

        Without receivers the messages are still produced, since gathering is collective. Returns when the memory of the
        messages may be changed; in the background, as soon as the messages of an earlier call are sent.
        """
        while self._sending:
            self._sending.pop(0).wait()
        (_, ranks) = self._groups[0]
        for message in messages:
            if not ranks:
                continue
            if self.in_background:
                self._sending.append(self._worker.broadcast(message, self._groups, self._source, async_op=True))
            else:
                self._worker.broadcast(message, self._groups, self._source)


class FlatWeights(SentWeights):
    """Named tensors in contiguous buffers, one buffer for each dtype.

    Equal names, shapes and dtypes give equal buffers, whatever the order of the names. Pieces are parts of the buffers.

    Args:
        tensors: the tensors to lay out; they are copied.

    Attributes:
        buffers: the contiguous memory, one tensor for each dtype.
        views: each tensor, by name; it shares memory with its buffer.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        ordered = dict(sorted(tensors.items()))
        self.buffers: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        # The present tensors of the module that computes with this memory, by name.
        self._owners: Callable[[], Mapping[str, Tensor]] = dict
        for dtype in sorted({tensor.dtype for tensor in tensors.values()}, key=str):
            self._lay_out({name: tensor for name, tensor in ordered.items() if tensor.dtype == dtype}, dtype)
        sizes = {name: view.numel() for name, view in self.views.items()}
        groups = grouped(self.views, lambda name: self.views[name].dtype, sizes)
        self.pieces = tuple(tuple(self._places(names)) for names in groups)

    def _lay_out(self, mine: dict[str, Tensor], dtype: torch.dtype) -> None:
        sizes = {name: _aligned(tensor.numel()) for name, tensor in mine.items()}
        buffer = torch.zeros(sum(sizes.values()), dtype=dtype, device=next(iter(mine.values())).device)
        self.buffers.append(buffer)
        for place in _placed(mine, {name: tuple(tensor.shape) for name, tensor in mine.items()}, sizes):
            self.views[place.name] = place.of(buffer)
            self.views[place.name].copy_(mine[place.name].detach())

    def _places(self, names: tuple[str, ...]) -> Iterator[Place]:
        first = int(self.views[names[0]].storage_offset())
        for name in names:
            view = self.views[name]
            yield Place(name, int(view.storage_offset()) - first, tuple(view.shape))

    def tensors(self) -> Iterator[Tensor]:
        """See `SentWeights`; the pieces share the memory of the weights."""
        self._keep()
        buffers = {buffer.dtype: buffer for buffer in self.buffers}
        for places in self.pieces:
            first = self.views[places[0].name]
            begin = int(first.storage_offset())
            yield buffers[first.dtype][begin : begin + places[-1].end]

    @classmethod
    def adopt(cls, module: nn.Module, chosen: Callable[[str], bool] | None = None) -> FlatWeights:
        """Return the flat weights of a module, which from now on computes with their memory.

        Weights that two layers share stay shared.

        Args:
            module: the owner of the weights.
            chosen: selects weights by name; None: all.
        """
        weights = cls(own_weights(module, chosen))
        weights._owners = lambda: own_weights(module, chosen)
        weights._give()
        return weights

    def _give(self) -> None:
        """Let the owners compute with the views."""
        for name, tensor in self._owners().items():
            tensor.data = self.views[name]

    @torch.no_grad()
    def _keep(self) -> None:
        """Take over the tensors that the module has replaced, such as a buffer of running statistics.

        Raises:
            RLinfError: a tensor has another shape or type.
        """
        for name, tensor in self._owners().items():
            view = self.views[name]
            if tensor.data_ptr() != view.data_ptr():
                _refuse_unlike(name, tensor, view)
                view.copy_(tensor)
                tensor.data = view

    @torch.no_grad()
    def load(self, first: FirstPiece[AboutT], others: Iterator[Tensor]) -> None:
        """Load the weights of an update, whose first message has arrived.

        Raises:
            RLinfError: the weights do not fit this module.
        """
        self._keep()
        names = {place.name for places in first.pieces for place in places}
        if names != set(self.views):
            _refuse(f"`{min(names ^ self.views.keys())}` is a weight of one of them only")
        piece = first.tensor
        for places in first.pieces:
            arrived = next(others) if piece is None else piece
            for place in places:
                theirs = place.of(arrived)
                _refuse_unlike(place.name, theirs, self.views[place.name])
                self.views[place.name].copy_(theirs)
            piece = None

    def move(self, device: torch.device) -> None:
        """Move the memory, and the module that computes with it, to a device, if it is elsewhere."""
        self._keep()
        for index, buffer in enumerate(self.buffers):
            if buffer.device == device:
                continue
            moved = buffer.to(device)
            self.buffers[index] = moved
            for name, view in self.views.items():
                if view.dtype == buffer.dtype:
                    self.views[name] = moved[view.storage_offset() :][: view.numel()].view(view.shape)
        self._give()

    @property
    def nbytes(self) -> int:
        """Size of all buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
