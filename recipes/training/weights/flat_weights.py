"""Contiguous buffers of the weights of a model, as they are sent from actor to rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from recipes.training.weights.sent_weights import ALIGNMENT, Place, SentWeights, grouped, own_weights


class FlatWeights(SentWeights):
    """Named tensors in contiguous buffers, one buffer for each dtype.

    Two of them with equal names, shapes and dtypes have equal buffers, whatever the order of the names. Their pieces
    are parts of the buffers.

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
        # Whose memory this is, by name.
        self._owners: dict[str, Tensor] = {}
        for dtype in sorted({tensor.dtype for tensor in tensors.values()}, key=str):
            self._lay_out({name: tensor for name, tensor in ordered.items() if tensor.dtype == dtype}, dtype)
        sizes = {name: view.numel() for name, view in self.views.items()}
        groups = grouped(self.views, lambda name: self.views[name].dtype, sizes)
        self.pieces = tuple(tuple(self._places(names)) for names in groups)

    def _lay_out(self, mine: dict[str, Tensor], dtype: torch.dtype) -> None:
        size = sum(_aligned(tensor.numel()) for tensor in mine.values())
        device = next(iter(mine.values())).device
        buffer = torch.zeros(size, dtype=dtype, device=device)
        self.buffers.append(buffer)
        offset = 0
        for name, tensor in mine.items():
            view = buffer[offset : offset + tensor.numel()].view(tensor.shape)
            view.copy_(tensor.detach())
            self.views[name] = view
            offset += _aligned(tensor.numel())

    def _places(self, names: tuple[str, ...]) -> Iterator[Place]:
        first = int(self.views[names[0]].storage_offset())
        for name in names:
            view = self.views[name]
            yield Place(name, int(view.storage_offset()) - first, tuple(view.shape))

    def tensors(self) -> Iterator[Tensor]:
        """See `SentWeights`; the pieces share the memory of the weights."""
        buffers = {buffer.dtype: buffer for buffer in self.buffers}
        for places in self.pieces:
            first = self.views[places[0].name]
            begin = int(first.storage_offset())
            yield buffers[first.dtype][begin : begin + places[-1].end]

    @classmethod
    def adopt(cls, module: nn.Module, chosen: Callable[[str], bool] | None = None) -> FlatWeights:
        """Return the flat weights of a module, which computes in this memory from now on.

        Weights that two layers share stay shared.

        Args:
            module: the owner of the weights.
            chosen: selects weights by their names; None: all.
        """
        own = own_weights(module, chosen)
        weights = cls(own)
        weights._owners = own
        weights._give()
        return weights

    def _give(self) -> None:
        """Let the owners compute with the views."""
        for name, tensor in self._owners.items():
            tensor.data = self.views[name]

    def move(self, device: torch.device) -> None:
        """Move the memory, and with it the module that computes with it, to a device; nothing where it is there."""
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
