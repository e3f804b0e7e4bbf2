"""The weights of a model as a few contiguous buffers, which travel from actor to rollout without being looked at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Every tensor begins at a multiple of so many elements, so that vector instructions find it aligned.
_ALIGNMENT = 32


class FlatWeights:
    """Named tensors laid out one behind the other, one buffer for each dtype.

    Two of them with equal names, shapes and dtypes have equal buffers, whatever the order of the names.

    Args:
        tensors: what is laid out. They are copied.

    Attributes:
        buffers: the contiguous memory, one tensor for each dtype.
        views: each tensor, by name; it shares memory with its buffer.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(sorted(tensors.items()))
        self.buffers: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        for dtype in sorted({tensor.dtype for tensor in tensors.values()}, key=str):
            self._lay_out(dtype)
        self._tensors = {}

    def _lay_out(self, dtype: torch.dtype) -> None:
        mine = {name: tensor for name, tensor in self._tensors.items() if tensor.dtype == dtype}
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

    @classmethod
    def adopt(cls, module: nn.Module) -> FlatWeights:
        """Those of a module, which from now on computes with this memory.

        Weights that two layers share stay shared.
        """
        state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        names: dict[int, str] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), name)
        own = {name: state[name] for name in names.values()}
        weights = cls(own)
        for name, tensor in own.items():
            tensor.data = weights.views[name]
        return weights

    @property
    def nbytes(self) -> int:
        """Size of all buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
