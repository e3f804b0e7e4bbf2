"""Normalization within a policy: buffers, so that weights carry it to rollouts and into checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from recipes.embodied.models.normalization import Scheme, Statistics


class Normalizer(nn.Module):
    """Shifts and scales D numbers; leaves them as they are until `fit`."""

    shift: Tensor
    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def fit(self, statistics: Statistics, scheme: Scheme) -> None:
        """Normalize by statistics of D numbers from now on.

        Raises:
            ValueError: they are of another number of numbers.
        """
        if len(statistics) != len(self.shift):
            raise ValueError(f"the statistics are of {len(statistics)} numbers, not of {len(self.shift)}")
        shift, scale = statistics.shift_and_scale(scheme)
        self.shift.copy_(torch.from_numpy(np.asarray(shift)))  # pyright: ignore[reportUnknownMemberType]
        self.scale.copy_(torch.from_numpy(np.asarray(scale)))  # pyright: ignore[reportUnknownMemberType]

    def forward(self, values: Tensor) -> Tensor:
        """Return values [..., D], normalized."""
        return (values - self.shift) / self.scale

    def inverse(self, values: Tensor) -> Tensor:
        """Return what `forward` normalized."""
        return values * self.scale + self.shift
