"""Weights of a folder that are no numbers: a copy that went wrong, or a training that had diverged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlinf_core import ConfigError


def require_finite(weights: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Check that weights that were read are finite.

    Args:
        weights: the weights by name; those that hold no floating-point numbers, or have no memory, are passed over.
        source: the file or folder that they are from.

    Raises:
        ConfigError: one holds a NaN or an infinity.
    """
    for name, weight in weights:
        if weight.is_meta or not weight.is_floating_point() or _is_finite(weight.detach()):
            continue
        count = int((~torch.isfinite(weight.detach())).sum())
        raise ConfigError(
            f"the weights in `{source}` hold values that are no finite numbers",
            why=f"`{name}` has {count} of {weight.numel()}, NaN or infinite",
            help="copy the file again from its source; if it came from a training, that training had diverged:"
            " take an earlier checkpoint",
        )


def _is_finite(weight: Tensor) -> bool:
    # The sum needs no memory, and is finite only where all numbers are. It may be too large where they are.
    return bool(torch.isfinite(weight.sum(dtype=torch.float32))) or bool(torch.isfinite(weight).all())
