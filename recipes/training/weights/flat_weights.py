"""Contiguous buffers of the weights of a model, as they are sent from actor to rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

# Every tensor begins at a multiple of so many elements, so that vector instructions find it aligned.
_ALIGNMENT = 32


class FlatWeights:
    """Named tensors in contiguous buffers, one buffer for each dtype.

    Two of them with equal names, shapes and dtypes have equal buffers, whatever the order of the names.

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

    @classmethod
    def adopt(cls, module: nn.Module, chosen: Callable[[str], bool] | None = None) -> FlatWeights:
        """Return the flat weights of a module, which computes with this memory from now on.

        Weights that two layers share stay shared.

        Args:
            module: the owner of the weights.
            chosen: selects weights by their names; None: all.
        """
        own = _own(module, chosen)
        weights = cls(own)
        weights._owners = own
        weights._give()
        return weights

    @classmethod
    def copied(
        cls,
        module: nn.Module,
        chosen: Callable[[str], bool] | None = None,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    ) -> FlatWeights:
        """Return a copy of a module's weights; the module keeps its own memory.

        Args:
            module: see `adopt`.
            chosen: see `adopt`.
            dtype: of the copies of floating-point weights, of all or by name; None: their own.
        """
        own = _own(module, chosen)
        types = dtype if isinstance(dtype, Mapping) else dict.fromkeys(own, dtype)
        return cls(
            {name: weight.to(types[name]) if weight.is_floating_point() else weight for name, weight in own.items()}
        )

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


def _own(module: nn.Module, chosen: Callable[[str], bool] | None) -> dict[str, Tensor]:
    """Return the weights of a module by name; those that layers share by the first of their names."""
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if chosen is not None:
        state = {name: tensor for name, tensor in state.items() if chosen(name)}
    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    return {name: state[name] for name in names.values()}


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
