"""The inputs, parameters and results of losses, and estimators of a divergence.

With x ~ policy and d = log policy(x) - log reference(x), KL(policy || reference) = E[d]. John Schulman, "Approximating
KL divergence" (http://joschu.net/blog/kl-approx.html) names the estimators:

    k1 = d                   unbiased, of high variance, often negative
    k2 = d^2 / 2             biased, of low variance; its gradient is that of the divergence
    k3 = exp(-d) - 1 + d     unbiased, of low variance, never negative
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rlinf_core.config.sections.values import LossAggregation
from rlinf_core.suggest import quoted

KlEstimator = Literal["k1", "k2", "k3"]
# Larger exponentials overflow in float32 products; a ratio of e^20 means that the policies have nothing in common.
MAX_LOG_RATIO = 20.0
# The unit over which a correction for the behaviour policy takes its ratio.
CorrectionLevel = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """A batch of n samples. The shape [n, ...] of `logprobs` is the level of ratios, such as tokens.

    Attributes:
        logprobs: float [n, ...], of the policy that learns, with gradients.
        old_logprobs: float [n, ...], of the denominator of ratios: the policy that acted, or, if `behaviour_logprobs`
            are given, the policy before the update.
        advantages: float, the shape of `logprobs` or its leading dimensions.
        entropy: float [n, ...], with gradients; None if not requested.
        ref_logprobs: float [n, ...], of the reference model; None: no KL in the loss.
        behaviour_logprobs: float [n, ...], of the policy that acted, if `old_logprobs` are another policy's; else None.
        mask: bool, the shape of `logprobs` or its leading dimensions; None: everything counts.
        values: float [n, ...], of the critic that learns, with gradients; None for a policy alone.
        old_values: float, the shape of `values`, when the samples were made.
        returns: float, the shape of `values`.
        value_mask: bool, the shape of `values` or its leading dimensions; None: everything counts.
        total: the denominator (`denominator`) of the whole batch if this is a part of it, averaged over parts and
            ranks, so that the mean of the parts' losses is the loss of the whole.
        entropy_total: the same for `entropy`, needed if its shape is not that of `logprobs`.
        value_total: the number of values that count in the whole batch.
        token_total: the denominator of the metrics' means over the whole batch, averaged over parts and ranks; None:
            metrics are means over this part.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor | None = None
    ref_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    mask: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    value_mask: Tensor | None = None
    total: Tensor | float | None = None
    entropy_total: Tensor | float | None = None
    value_total: Tensor | float | None = None
    token_total: Tensor | float | None = None

    @property
    def ratio(self) -> Tensor:
        """The present probability over the old one, with gradients, the shape of `logprobs`."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The keys of `algorithm` that losses depend on.

    Attributes:
        options: `algorithm.options`, as the loss's own pydantic model or a dictionary (`algorithms.options`).
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    loss_agg_func: LossAggregation = "token-mean"
    entropy_bonus: float = 0.0
    kl_beta: float = 0.0
    kl_penalty: KlEstimator = "k3"
    tis_cap: float | None = None
    correction_level: CorrectionLevel = "token"
    reject_ratio_low: float | None = None
    reject_ratio_high: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    value_clip: float | None = 0.2
    huber_delta: float | None = 10.0
    value_weight: float = 1.0
    options: Any = field(default_factory=dict[str, Any])

    @property
    def rejects(self) -> bool:
        """Whether samples are excluded by their ratios."""
        return self.reject_ratio_low is not None or self.reject_ratio_high is not None

    @classmethod
    def of(cls, config: object) -> LossSettings:
        """Return the settings from a section `algorithm`; a key that the section lacks keeps its default."""
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        return cls(**{name: getattr(config, name) for name in names})


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss to minimize, and metrics of the batch.

    Attributes:
        loss: scalar, with gradients.
        metrics: scalars without gradients, by name, as in `actor/policy_loss`. Reports prefix `train/`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Return the estimated KL(policy || reference) at each sample.

    Args:
        logprobs: float, any shape; of the policy that made the samples.
        ref_logprobs: the same for the reference.
        estimator: k1, k2 or k3. k3 clamps differences to [-20, 20].

    Returns:
        The shape of `logprobs`.

    Raises:
        ValueError: the estimator is not one of the three.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown divergence estimator `{estimator}`")


# Aggregation of the losses of many tokens into one number, over one batch or in parts of it.
#
# Losses have the shape [sequences, ...]: the first dimension counts sequences (samples, answers), all others together
# are the tokens of a sequence. A mask of the same shape, or of its leading dimensions, says which tokens count.
#
#     token-mean               sum of all tokens / number of tokens                (DAPO, arXiv 2503.14476, eq. 8)
#     seq-mean-token-sum       mean over sequences of the sum over their tokens
#     seq-mean-token-sum-norm  the same, divided by the maximum number of tokens of a sequence
#                                                                                (Dr. GRPO, arXiv 2503.20783, appendix)
#     seq-mean-token-mean      mean over sequences of the mean over their tokens   (GRPO, arXiv 2402.03300, eq. 3)
#
# Means leave out sequences of which no token counts.


AGGREGATIONS: tuple[str, ...] = get_args(LossAggregation)


def broadcast_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return `mask` as bool, repeated over its missing trailing dimensions to the shape of `like`; None: all True."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return broadcast_trailing(mask.bool(), like.shape)


def broadcast_trailing(values: Tensor, shape: torch.Size) -> Tensor:
    """Return `values` repeated over their missing trailing dimensions to `shape`.

    Raises:
        ValueError: the shape of `values` is not the beginning of `shape`.
    """
    if values.shape != shape[: values.dim()]:
        raise ValueError(f"shape {list(values.shape)} is not the beginning of {list(shape)}")
    return values.reshape(*values.shape, *[1] * (len(shape) - values.dim())).expand(shape)


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of the values that count, a scalar; 0 if none counts."""
    if mask is None:
        return values.mean()
    counted = broadcast_trailing(mask.bool(), values.shape)
    return torch.where(counted, values, 0).sum() / counted.sum().clamp(min=1)


def denominator(
    mask: Tensor | None, shape: torch.Size, how: LossAggregation, least: int = 1, longest: int | None = None
) -> Tensor:
    """Return the denominator of `aggregate`, a float32 scalar: the number of counted tokens or sequences, at least
    `least`.

    With `seq-mean-token-sum-norm` the number of sequences is multiplied by `longest`, the maximum number of tokens of a
    sequence, by default that of `shape`.

    To accumulate gradients over micro batches or ranks, pass the sum of the parts' denominators to `aggregate` for each
    part: the losses of the parts then add up to the loss of the whole. A part in which nothing counts must add nothing,
    so use `least` 0 for parts, and at least 1 for the sum.
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
    """Aggregate the losses of many tokens into one.

    Args:
        losses: float [sequences, ...].
        mask: bool, the shape of `losses` or its leading dimensions; None: everything counts.
        how: one of `AGGREGATIONS`, as defined above.
        total: the denominator of the whole batch when `losses` is a part of it, see `denominator`.

    Returns:
        A scalar.

    Raises:
        ValueError: `how` is unknown.
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
