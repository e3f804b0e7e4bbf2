"""A look at whether an optimizer step changes the weights: one of a low precision rounds small updates away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from recipes.training.typed_tensors import integers, local_part

# Enough to tell all from none; the whole of a large model would cost a pass over its memory.
_WEIGHTS: Final = 8
_NUMBERS: Final = 512


class WeightSample(NamedTuple):
    """Some numbers of the trained weights before an optimizer step.

    Attributes:
        views: parts of the weights, each 1-D.
        before: their values, float [n].
        counted: bool [n], those with a gradient that is not 0.
    """

    views: Sequence[Tensor]
    before: Tensor
    counted: Tensor

    @classmethod
    def of(cls, module: nn.Module) -> WeightSample | None:
        """Return a sample of the weights of `module` with gradients, a shard's own on each rank; None without any."""
        trained = [(weight.detach(), weight.grad) for weight in module.parameters() if weight.grad is not None]
        chosen = trained[:: max(1, len(trained) // _WEIGHTS)][:_WEIGHTS]
        if not chosen:
            return None
        views = [_numbers(weight) for weight, _ in chosen]
        return cls(views, torch.cat(views), torch.cat([_numbers(gradient) for _, gradient in chosen]) != 0)

    def changed(self) -> float:
        """Return the share of the counted numbers that differ now, from 0 to 1; 1 where none is counted."""
        differ = torch.cat(list(self.views)) != self.before
        changed, whole = integers(torch.stack(((differ & self.counted).sum(), self.counted.sum())))
        return changed / whole if whole else 1.0


def _numbers(tensor: Tensor) -> Tensor:
    mine = local_part(tensor)
    return mine.reshape(-1)[:_NUMBERS] if mine.is_contiguous() else mine.select(0, 0).reshape(-1)[:_NUMBERS]
