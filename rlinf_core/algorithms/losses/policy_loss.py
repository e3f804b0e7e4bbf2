"""The clipped surrogate of PPO, and the losses that `algorithm.loss_type` names."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_core.algorithms.aggregation import aggregate, expand_trailing, masked_mean
from rlinf_core.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from rlinf_core.algorithms.losses.inputs import Loss, LossInputs, LossSettings
from rlinf_core.algorithms.losses.value_loss import clipped_value_loss


def clipped_policy_losses(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_c: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of PPO by sample: max(-A r, -A clip(r, 1 - low, 1 + high)).

    Schulman et al., "Proximal policy optimization algorithms", arXiv 1707.06347, eq. 7. Unequal bounds are the
    clip-higher of DAPO (arXiv 2503.14476, eq. 10). With `clip_c` the loss of a negative advantage is at most -A c, the
    dual clip of Ye et al., arXiv 1912.09729, eq. 5.

    Args:
        ratio: float [...], probability now over probability when the samples were made.
        advantages: float [...].
        clip_low: smallest ratio is 1 - clip_low.
        clip_high: largest ratio is 1 + clip_high.
        clip_c: bound for negative advantages, above 1; None: none.

    Returns:
        The losses, whether the clip was active, whether the dual clip was; each [...].
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses, active = torch.maximum(plain, clipped), clipped > plain
    if clip_c is None:
        return losses, active, torch.zeros_like(active)
    bound = -advantages * clip_c
    dual = (advantages < 0) & (bound < losses)
    return torch.where(dual, bound, losses), active, dual


def actor(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return policy loss - entropy_bonus * entropy + kl_beta * divergence from the reference.

    `approx_kl` is the k3 estimate of the divergence of the policy from the one that acted, `clip_fraction` the share of
    samples whose gradient the clip stopped.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = expand_trailing(inputs.advantages, ratio.shape)
    losses, active, dual = clipped_policy_losses(
        ratio, advantages, settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c
    )
    how, mask = settings.loss_agg_func, inputs.mask
    policy_loss = loss = aggregate(losses, mask, how, inputs.total)
    with torch.no_grad():
        metrics = {
            "actor/policy_loss": policy_loss.detach(),
            "actor/approx_kl": masked_mean(ratio - 1 - log_ratio, mask),
            "actor/clip_fraction": masked_mean(active.float(), mask),
            "actor/ratio": masked_mean(ratio, mask),
        }
        if settings.clip_ratio_c is not None:
            metrics["actor/dual_clip_fraction"] = masked_mean(dual.float(), mask)
    if inputs.entropy is not None:
        entropy = aggregate(inputs.entropy, _leading(mask, inputs.entropy), how, _entropy_total(inputs, inputs.entropy))
        metrics["actor/entropy"] = entropy.detach()
        if settings.entropy_bonus:
            loss = loss - settings.entropy_bonus * entropy
    if inputs.ref_logprobs is not None:
        divergence = kl_estimate(inputs.logprobs, inputs.ref_logprobs, settings.kl_penalty)
        kl = aggregate(divergence, mask, how, inputs.total)
        metrics["actor/kl_ref"] = kl.detach()
        loss = loss + settings.kl_beta * kl
    return Loss(loss, metrics)


def actor_critic(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of `actor` plus the value loss.

    Raises:
        ValueError: values, old values or returns are missing.
    """
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise ValueError("`loss_type: actor_critic` needs values, old values and returns")
    policy = actor(inputs, settings)
    losses, clipped = clipped_value_loss(
        inputs.values, inputs.old_values, inputs.returns, settings.value_clip, settings.huber_delta
    )
    value_loss = aggregate(losses, inputs.value_mask, "token-mean", inputs.value_total)
    metrics = {
        "critic/value_loss": value_loss.detach(),
        "critic/value_clip_fraction": masked_mean(clipped.float(), inputs.value_mask),
    }
    return Loss(policy.loss + value_loss, policy.metrics | metrics)


def _leading(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return `mask` reduced to the dimensions of `like`: an action counts when any of its tokens does."""
    if mask is None or mask.dim() <= like.dim():
        return mask
    return mask.bool().flatten(start_dim=like.dim()).any(dim=-1) if like.dim() else mask


def _entropy_total(inputs: LossInputs, entropy: Tensor) -> Tensor | float | None:
    if inputs.entropy_total is not None or inputs.total is None:
        return inputs.entropy_total
    if entropy.shape != inputs.logprobs.shape:
        raise ValueError("a part of a batch needs `entropy_total` where entropies are not of the level of `logprobs`")
    return inputs.total
