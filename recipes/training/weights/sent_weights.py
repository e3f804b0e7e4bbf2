"""Weights as they are sent: pieces of some megabytes, one after the other, never all of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from recipes.training.reading.tied_weights import names_of_one_tensor

# Tensors travel together until they are that many bytes; a larger one travels alone. A message costs as much processor
# time as copying 4 MB: with pieces of 4 MB either side needs a fifth more of it.
PIECE_BYTES: Final = 16 << 20
# Every tensor begins at a multiple of that many elements, so that vector instructions find it aligned.
ALIGNMENT: Final = 32


class Place(NamedTuple):
    """The place of a tensor in a piece: its name, its first element, its shape."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The element behind its last."""
        return self.offset + _numel(self.shape)

    def of(self, piece: Tensor) -> Tensor:
        """Return the tensor, which shares the memory of the piece."""
        return piece[self.offset : self.end].view(self.shape)


class SentWeights(ABC):
    """The weights of a model on their way to those that act by them.

    Attributes:
        pieces: where the tensors of each piece lie in it.
    """

    pieces: tuple[tuple[Place, ...], ...]

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yield the pieces, [n] each. Collective: all ranks that share the weights go through them together."""


class GatheredWeights(SentWeights):
    """Weights whose shards are gathered a piece at a time.

    Args:
        weights: shards by name.
        types: the types in which floating-point weights are sent, of all or by name; None: their own.
        full_tensor: gathers one; collective.
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
        # By type, and else in the order of the model: what belongs to a block is gathered together.
        ordered = sorted(shapes, key=lambda name: str(self._types[name]))
        sizes = {name: _aligned(_numel(shapes[name])) for name in ordered}
        pieces = grouped(ordered, lambda name: self._types[name], sizes)
        self.pieces = tuple(tuple(_placed(names, shapes, sizes)) for names in pieces)

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        """See `SentWeights`; each piece has its own memory, which nothing else changes."""
        with self._onloaded():
            weights = self._weights()
            for places in self.pieces:
                yield self._gathered(places, weights)

    def _gathered(self, places: tuple[Place, ...], weights: Mapping[str, Tensor]) -> Tensor:
        last = places[-1]
        first = weights[last.name]
        piece = torch.zeros(last.end, dtype=self._types[last.name], device=first.device)
        for place in places:
            # In the type that it is sent in: half the bytes travel between ranks where that is half as wide.
            place.of(piece).copy_(self._full_tensor(weights[place.name].detach().to(piece.dtype)))
        return piece


def grouped(
    names: Iterable[str], dtype: Callable[[str], torch.dtype], sizes: Mapping[str, int]
) -> Iterator[tuple[str, ...]]:
    """Yield names in groups of one type and of up to `PIECE_BYTES`.

    Args:
        names: the names, in their order.
        dtype: the type of the tensor of a name.
        sizes: elements of each.
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
    """Return the weights of a module by name, of those that layers share by the first of their names.

    Args:
        module: the owner.
        chosen: selects weights by their names; None: all.
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


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
