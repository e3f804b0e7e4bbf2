"""Aggregation of the losses of many tokens into one number, over one batch or in parts of it.

Losses have the shape [sequences, ...]: the first dimension counts sequences (samples, answers), all others together are
the tokens of a sequence. A mask of the same shape, or of its leading dimensions, says which tokens count.

    token-mean               sum of all tokens / number of tokens                (DAPO, arXiv 2503.14476, eq. 8)
    seq-mean-token-sum       mean over sequences of the sum over their tokens
    seq-mean-token-sum-norm  the same, divided by the tokens that a sequence may have at most
                                                                                 (Dr. GRPO, arXiv 2503.20783, appendix)
    seq-mean-token-mean      mean over sequences of the mean over their tokens   (GRPO, arXiv 2402.03300, eq. 3)

Sequences of which no token counts are left out of every mean.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from rlinf_core.config.sections.values import LossAggregation
from rlinf_core.suggest import quoted

AGGREGATIONS: tuple[str, ...] = get_args(LossAggregation)


def broadcast_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return `mask` as bool of the shape of `like`, repeated over dimensions it lacks; None: everything counts."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return broadcast_trailing(mask.bool(), like.shape)


def broadcast_trailing(values: Tensor, shape: torch.Size) -> Tensor:
    """Return `values` repeated over the trailing dimensions that `shape` has and they lack.

    Raises:
        ValueError: the dimensions they have are not the leading ones of `shape`.
    """
    if values.shape != shape[: values.dim()]:
        raise ValueError(f"shape {list(values.shape)} is not the beginning of {list(shape)}")
    return values.reshape(*values.shape, *[1] * (len(shape) - values.dim())).expand(shape)


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of the values that count, a scalar; 0 when none does."""
    if mask is None:
        return values.mean()
    counted = broadcast_trailing(mask.bool(), values.shape)
    return torch.where(counted, values, 0).sum() / counted.sum().clamp(min=1)


def denominator(
    mask: Tensor | None, shape: torch.Size, how: LossAggregation, least: int = 1, longest: int | None = None
) -> Tensor:
    """Return the denominator of `aggregate`, a float32 scalar: how many tokens, or sequences, count; at least `least`.

    With `seq-mean-token-sum-norm` the number of sequences is multiplied by `longest`, the most tokens that a sequence
    may have, by default as many as `shape` has room for.

    To accumulate gradients over micro batches, or over ranks, add up the denominators of all parts and hand the sum to
    `aggregate` of each part: the losses of the parts then add up to the loss of the whole. A part of which nothing
    counts must add nothing, so `least` is 0 for parts, and the sum is at least 1.
    """
    scale = 1
    if how == "seq-mean-token-sum-norm":
        scale = longest or shape[1:].numel()
    if mask is None:
        count = shape.numel() if how == "token-mean" else shape[0]
        return torch.tensor(float(max(count, least))) * scale
    counted = broadcast_trailing(mask.bool(), shape).reshape(shape[0], -1)
    number = counted.sum() if how == "token-mean" else counted.any(dim=1).sum()
    return number.clamp(min=least).float() * scale


def aggregate(
    losses: Tensor,
    mask: Tensor | None = None,
    how: LossAggregation = "token-mean",
    total: Tensor | float | None = None,
) -> Tensor:
    """Return one loss out of many.

    Args:
        losses: float [sequences, ...].
        mask: bool, the shape of `losses` or its leading dimensions; None: everything counts.
        how: see the module.
        total: the denominator of the whole batch when `losses` is a part of it, see `denominator`.

    Returns:
        A scalar.

    Raises:
        ValueError: `how` is not one of them.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation `{how}`, known: {quoted(AGGREGATIONS)}")
    if mask is None and total is None and how in ("token-mean", "seq-mean-token-mean"):
        return losses.mean()  # sequences of equal length: the two means are the same
    count = denominator(mask, losses.shape, how) if total is None else total
    rows = losses.reshape(losses.shape[0], -1)
    counted = broadcast_mask(mask, losses).reshape(rows.shape)
    rows = torch.where(counted, rows, 0)
    if how == "seq-mean-token-mean":
        return (rows.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).sum() / count
    return rows.sum() / count
