"""Operations on tensors whose results torch leaves untyped."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def integers(tensor: Tensor) -> list[int]:
    """Return the values of a tensor of whole numbers, [n], as a list."""
    return cast("list[int]", tensor.tolist())


def pieces(tensor: Tensor, lengths: list[int]) -> list[Tensor]:
    """Return consecutive pieces of a tensor, of these lengths."""
    return list(cast("tuple[Tensor, ...]", tensor.split(lengths)))


def floats(tensor: Tensor) -> list[float]:
    """Return the values of a tensor of floats, [n], as a list."""
    return cast("list[float]", tensor.tolist())
