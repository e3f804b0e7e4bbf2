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
    """Some numbers of the trained weights before an optimizer step, those with a gradient.

    Attributes:
        weights: views of the weights, each 1-D.
        before: copies of them.
        counted: bool of their shapes: where the gradient is not 0.
    """

    weights: Sequence[Tensor]
    before: Sequence[Tensor]
    counted: Sequence[Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> WeightSample:
        """Return a sample of the weights of `module` with gradients, a shard's own on each rank."""
        trained = [(weight, weight.grad) for weight in module.parameters() if weight.grad is not None]
        chosen = trained[:: max(1, len(trained) // _WEIGHTS)][:_WEIGHTS]
        weights = [_numbers(weight.detach()) for weight, _ in chosen]
        counted = [_numbers(gradient) != 0 for _, gradient in chosen]
        return cls(weights, [weight.clone() for weight in weights], counted)

    def changed(self) -> float:
        """Return the share of the numbers that differ now, from 0 to 1; 1 where none has a gradient."""
        if not self.weights:
            return 1.0
        counts = [
            torch.stack(((now != before)[counted].sum(), counted.sum()))
            for now, before, counted in zip(self.weights, self.before, self.counted, strict=True)
        ]
        changed, whole = integers(torch.stack(counts).sum(dim=0))
        return changed / whole if whole else 1.0


def _numbers(tensor: Tensor) -> Tensor:
    mine = local_part(tensor)
    return mine.reshape(-1)[:_NUMBERS] if mine.is_contiguous() else mine.select(0, 0).reshape(-1)[:_NUMBERS]
