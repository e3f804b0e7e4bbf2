"""Operations on tensors whose results torch leaves untyped."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def floats(tensor: Tensor) -> list[float]:
    """Return the values of a tensor of floats, [n], as a list."""
    return cast("list[float]", tensor.tolist())
