"""The clipped surrogate of PPO, and the losses that `algorithm.loss_type` names."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_core.algorithms.aggregation import aggregate, expand_mask, expand_trailing, masked_mean
from rlinf_core.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from rlinf_core.algorithms.losses.inputs import Loss, LossInputs, LossSettings
from rlinf_core.algorithms.losses.value_loss import value_loss


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

    With `tis_cap` each sample is weighted by min(old / behaviour, tis_cap), the truncated importance sampling of
    Ionides (2008), for samples of an engine, or of weights, that are not those of `old_logprobs`.

    `approx_kl` is the k3 estimate of the divergence of the policy from the one that acted, `clip_fraction` the share of
    samples whose gradient the clip stopped.

    Raises:
        ValueError: `tis_cap` is given, and `behaviour_logprobs` are missing.
    """
    weights = None if settings.tis_cap is None else _behaviour_weights(inputs, settings.tis_cap, "tis_cap")
    return _policy_loss(inputs, settings, inputs.logprobs - inputs.old_logprobs, weights)


def decoupled_actor(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of `actor` with three policies: the ratio is clipped around `old_logprobs`, the proximal policy,
    and each sample is weighted by old / behaviour, in the place of what the clip cannot make up for.

    Hilton et al., "Batch size-invariance for policy optimization", arXiv 2110.00641, eq. 4; for samples of older
    weights Fu et al., "AReaL", arXiv 2505.24298, section 5.2. Weights are at most `tis_cap` where that is given.

    Raises:
        ValueError: `behaviour_logprobs` are missing.
    """
    weights = _behaviour_weights(inputs, settings.tis_cap, "loss_type: decoupled_actor")
    return _policy_loss(inputs, settings, inputs.logprobs - inputs.old_logprobs, weights)


def gspo(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of `actor` with one ratio for each sequence, the geometric mean of those of its tokens that
    count.

    Zheng et al., "Group sequence policy optimization", arXiv 2507.18071: eq. 7 for the ratio, eq. 14 for gradients by
    token, which allow advantages by token. `loss_agg_func: seq-mean-token-mean` gives eq. 5; bounds of the ratio are
    about 3e-4 there.
    """
    difference = inputs.logprobs - inputs.old_logprobs
    rows = difference.detach().reshape(difference.shape[0], -1)
    counted = expand_mask(inputs.mask, difference).reshape(rows.shape)
    means = torch.where(counted, rows, 0).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
    sequence = means.reshape(-1, *[1] * (difference.dim() - 1))
    # Of the value of the sequence's ratio, and of the gradient of the token's.
    log_ratio = sequence + inputs.logprobs - inputs.logprobs.detach()
    weights = None if settings.tis_cap is None else _behaviour_weights(inputs, settings.tis_cap, "tis_cap")
    return _policy_loss(inputs, settings, log_ratio, weights)


def _behaviour_weights(inputs: LossInputs, cap: float | None, needed_by: str) -> Tensor:
    if inputs.behaviour_logprobs is None:
        raise ValueError(f"`{needed_by}` needs the log-probabilities of the policy that drew the samples")
    log_weights = inputs.old_logprobs - inputs.behaviour_logprobs
    return log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(min=0, max=cap)


def _policy_loss(inputs: LossInputs, settings: LossSettings, log_ratio: Tensor, weights: Tensor | None) -> Loss:
    """Return the clipped loss of ratios, times `weights`, with entropy and divergence."""
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = expand_trailing(inputs.advantages, ratio.shape)
    losses, active, dual = clipped_policy_losses(
        ratio, advantages, settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c
    )
    if weights is not None:
        losses = losses * weights
    how, mask = settings.loss_agg_func, inputs.mask
    policy_loss = loss = aggregate(losses, mask, how, inputs.total)
    with torch.no_grad():
        means = {"approx_kl": ratio - 1 - log_ratio, "clip_fraction": active.float(), "ratio": ratio}
        if settings.clip_ratio_c is not None:
            means["dual_clip_fraction"] = dual.float()
        if weights is not None:
            means["behaviour_weight"] = weights
            if settings.tis_cap is not None:
                means["tis_fraction"] = (weights >= settings.tis_cap).float()
        metrics = {"actor/policy_loss": policy_loss.detach()}
        metrics |= {f"actor/{name}": _mean(tensor, mask, inputs.token_total) for name, tensor in means.items()}
        metrics["actor/ratio_max"] = torch.where(expand_mask(mask, ratio), ratio, 0).amax()
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


def _mean(values: Tensor, mask: Tensor | None, total: Tensor | float | None) -> Tensor:
    """Return the mean of what counts, or, where that is a part of a batch, its part of the mean of the batch."""
    return masked_mean(values, mask) if total is None else aggregate(values, mask, "token-mean", total)


def actor_critic(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of `actor` plus `value_weight` times the value loss.

    Raises:
        ValueError: values, old values or returns are missing.
    """
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise ValueError("`loss_type: actor_critic` needs values, old values and returns")
    policy = actor(inputs, settings)
    value = value_loss(
        inputs.values, inputs.old_values, inputs.returns, settings, inputs.value_mask, inputs.value_total
    )
    return Loss(policy.loss + settings.value_weight * value.loss, policy.metrics | value.metrics)


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
