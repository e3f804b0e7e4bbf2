"""Data types by the names that `precision` and `mixed_precision` use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype | None:
    """Return the type that layers compute in where it is another than that of the trained weights, float32."""
    dtype = DTYPES[precision]
    return None if dtype == torch.float32 else dtype


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert all weights of a module to a type. Buffers keep theirs: rotary angles need full precision."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
