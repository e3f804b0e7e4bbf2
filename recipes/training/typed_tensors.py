"""Data types by their names in a job file, and typed wrappers of operations that torch leaves untyped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeGuard, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def integers(tensor: Tensor) -> list[int]:
    """Return an integer tensor, [n], as a list."""
    return cast("list[int]", tensor.tolist())


def pieces(tensor: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split a tensor into consecutive pieces of the given lengths."""
    return list(cast("tuple[Tensor, ...]", tensor.split(lengths)))


def floats(tensor: Tensor) -> list[float]:
    """Return the values of a tensor of floats, [n], as a list."""
    return cast("list[float]", tensor.tolist())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns), a scalar: 1 for perfect, 0 for constant, below 0 for worse
    values.

    Constant returns give 0. Only the entries that `mask` marks count.
    """
    values, returns = values.detach(), returns.detach()
    if mask is not None:
        values, returns = values[mask.bool()], returns[mask.bool()]
    if returns.numel() < 2:
        return torch.zeros(())
    variance = returns.var(correction=0)
    unexplained = (returns - values).var(correction=0)
    return torch.where(variance > 0, 1 - unexplained / variance, torch.zeros_like(variance))


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is this rank's shard of a larger one. Without `DTensor` imported, no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return a tensor, or this rank's shard of it."""
    return tensor.to_local() if is_shard(tensor) else tensor


DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype | None:
    """Return the type that layers compute in; None if it is that of the trained weights, float32."""
    dtype = DTYPES[precision]
    return None if dtype == torch.float32 else dtype


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert all weights of a module to a type. Buffers keep their types: rotary angles need full precision."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
