"""The clipped surrogate of PPO, the losses that `algorithm.loss_type` names, and the loss of a value function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor

from rlinf_core.algorithms.loss_inputs import (
    MAX_LOG_RATIO,
    Loss,
    LossInputs,
    LossSettings,
    aggregate,
    broadcast_mask,
    broadcast_trailing,
    kl_estimate,
    masked_mean,
)
from rlinf_core.suggest import short_repr

# A function of ratios and advantages, both [n, ...], that returns the losses, where the clip was active, and where the
# dual clip was (None without one).
_Surrogate: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


def clipped_policy_losses(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_c: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the PPO loss of each sample: max(-A r, -A clip(r, 1 - low, 1 + high)).

    Schulman et al., "Proximal policy optimization algorithms", arXiv 1707.06347, eq. 7. Unequal bounds are the
    clip-higher of DAPO (arXiv 2503.14476, eq. 10). With `clip_c` the loss of a negative advantage is at most -A c, the
    dual clip of Ye et al., arXiv 1912.09729, eq. 5.

    Args:
        ratio: float [...], the present probability over the old one.
        advantages: float [...].
        clip_low: the smallest ratio is 1 - clip_low.
        clip_high: the largest ratio is 1 + clip_high.
        clip_c: the bound c for negative advantages, above 1; None: no bound.

    Returns:
        The losses, where the clip was active, and where the dual clip was; each [...].
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
    """Return policy loss - entropy_bonus * entropy + kl_beta * KL from the reference.

    With `tis_cap` each sample is weighted by min(old / behaviour, tis_cap), the truncated importance sampling of
    Ionides (2008), for samples from another inference backend or other weights than `old_logprobs`. Samples with a
    ratio below `reject_ratio_low` or above `reject_ratio_high` are not trained on. See `_behaviour_weights`.

    `approx_kl` is the k3 estimate of the KL between the policy of `old_logprobs` and the present one, `clip_fraction`
    the fraction of samples whose gradient the clip stopped.

    Raises:
        ValueError: a correction is requested, and `behaviour_logprobs` are missing.
    """
    return _policy_loss(inputs, settings, inputs.logprobs - inputs.old_logprobs, _asked_correction(inputs, settings))


def decoupled_actor(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of `actor` with a separate proximal and behaviour policy.

    The ratio is clipped around the proximal policy, `old_logprobs`, and each sample is weighted by old / behaviour:
    Hilton et al., "Batch size-invariance for policy optimization", arXiv 2110.00641, eq. 4; for samples of older
    weights Fu et al., "AReaL", arXiv 2505.24298, section 5.2. `tis_cap`, if given, bounds the weights.

    Raises:
        ValueError: `behaviour_logprobs` are missing.
    """
    weights = _behaviour_weights(inputs, settings, "loss_type: decoupled_actor")
    return _policy_loss(inputs, settings, inputs.logprobs - inputs.old_logprobs, weights)


def gspo(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of `actor` with one ratio per sequence, the geometric mean of the ratios of its counted tokens.

    Zheng et al., "Group sequence policy optimization", arXiv 2507.18071: eq. 7 for the ratio, eq. 14 for gradients by
    token, which allow advantages by token. `loss_agg_func: seq-mean-token-mean` gives eq. 5. The paper's clip bounds
    are about 3e-4.
    """
    total, count = _sequence_sums(inputs.logprobs.detach() - inputs.old_logprobs, inputs.mask)
    sequence = total / count
    # The value is the sequence's log-ratio; the gradient is that of the token's log-ratio.
    log_ratio = sequence + inputs.logprobs - inputs.logprobs.detach()
    return _policy_loss(inputs, settings, log_ratio, _asked_correction(inputs, settings))


def gmpo(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return -A times the geometric mean of the ratios of a sequence's tokens, each clipped in log space.

    Zhao et al., "Geometric-mean policy optimization", arXiv 2507.20673, eq. 4: a log-ratio is bounded by
    [-clip_ratio_low, clip_ratio_high] where that lowers the objective. The paper's bounds are about 0.4, and its mean
    over sequences is `loss_agg_func: seq-mean-token-mean`. There is no dual clip.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clipped = log_ratio.clamp(-settings.clip_ratio_low, settings.clip_ratio_high)
    rises = broadcast_trailing(inputs.advantages, log_ratio.shape) > 0
    kept = torch.where(rises, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    total, count = _sequence_sums(kept, inputs.mask)
    active = kept != log_ratio
    return _policy_loss(
        inputs,
        settings,
        (total / count).expand_as(log_ratio),
        _asked_correction(inputs, settings),
        lambda ratio, advantages: (-advantages * ratio, active, None),
    )


def cispo(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return REINFORCE's loss, each token weighted by its ratio, which is clipped and has no gradient.

    MiniMax, "MiniMax-M1", arXiv 2506.13585, eq. 4 and 5: -sg(clip(r, 1 - low, 1 + high)) A log p. Every token keeps a
    gradient. As in the paper, `clip_ratio_low: 1` leaves the ratio without a lower bound. There is no dual clip.
    """

    def surrogate(ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        weight = ratio.detach().clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
        return -advantages * weight * inputs.logprobs, weight != ratio, None

    log_ratio = inputs.logprobs - inputs.old_logprobs
    return _policy_loss(inputs, settings, log_ratio, _asked_correction(inputs, settings), surrogate)


def sapo(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return -A f(r) with the soft gate f(r) = 4 / tau sigmoid(tau (r - 1)) instead of a clip.

    Gao et al., "Soft adaptive policy optimization", arXiv 2511.20347, eq. 5 and 6. The gradient is that of the plain
    ratio at r = 1 and decays on both sides, faster for a larger tau: `tau_pos` where A > 0, else `tau_neg`. The clip
    bounds have no effect.
    """

    def surrogate(ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        tau = torch.where(advantages > 0, ratio.new_tensor(settings.tau_pos), ratio.new_tensor(settings.tau_neg))
        gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
        return -advantages * gate, torch.zeros_like(ratio, dtype=torch.bool), None

    log_ratio = inputs.logprobs - inputs.old_logprobs
    return _policy_loss(inputs, settings, log_ratio, _asked_correction(inputs, settings), surrogate)


def _sequence_sums(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each sequence's sum of the values that count, and their number, at least 1; both [n, 1, ...]."""
    rows = values.reshape(values.shape[0], -1)
    counted = broadcast_mask(mask, values).reshape(rows.shape)
    ones = (-1, *[1] * (values.dim() - 1))
    return torch.where(counted, rows, 0).sum(dim=1).reshape(ones), counted.sum(dim=1).clamp(min=1).reshape(ones)


def _asked_correction(inputs: LossInputs, settings: LossSettings) -> Tensor | None:
    """Return the weights of the samples if a key requests a correction, else None."""
    asked = {name: getattr(settings, name) for name in ("tis_cap", "reject_ratio_low", "reject_ratio_high")}
    named = next((name for name, value in asked.items() if value is not None), None)
    return None if named is None else _behaviour_weights(inputs, settings, named)


def _behaviour_weights(inputs: LossInputs, settings: LossSettings, needed_by: str) -> Tensor:
    """Return the weight of each token, [n, ...]: old / behaviour, at most `tis_cap`.

    With `correction_level: sequence` the weight is the product over the sequence's counted tokens. A sample is
    rejected, with weight 0, if its ratio is below `reject_ratio_low` or above `reject_ratio_high`: the token's ratio,
    as in IcePop (Ling Team, arXiv 2510.18855), or the geometric mean over the sequence. If only rejection was
    requested, the samples kept have weight 1.
    """
    if inputs.behaviour_logprobs is None:
        raise ValueError(f"`{needed_by}` needs the log-probabilities of the policy that drew the samples")
    log_weights = judged = inputs.old_logprobs - inputs.behaviour_logprobs
    if settings.correction_level == "sequence":
        total, count = _sequence_sums(log_weights, inputs.mask)
        log_weights, judged = (value.expand_as(log_weights) for value in (total, total / count))
    weights = log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(min=0, max=settings.tis_cap)
    if settings.tis_cap is None and needed_by.startswith("reject"):
        weights = torch.ones_like(weights)
    low, high = settings.reject_ratio_low, settings.reject_ratio_high
    if low is not None:
        weights = torch.where(judged < math.log(low), 0, weights)
    if high is not None:
        weights = torch.where(judged > math.log(high), 0, weights)
    return weights


def _policy_loss(
    inputs: LossInputs,
    settings: LossSettings,
    log_ratio: Tensor,
    weights: Tensor | None,
    surrogate: _Surrogate | None = None,
) -> Loss:
    """Return the weighted surrogate loss (by default PPO's clip) with the entropy bonus and the KL term."""
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = broadcast_trailing(inputs.advantages, ratio.shape)
    losses, active, dual = (surrogate or _clip_of(settings))(ratio, advantages)
    if weights is not None:
        losses = losses * weights
    how, mask = settings.loss_agg_func, inputs.mask
    policy_loss = loss = aggregate(losses, mask, how, inputs.total)
    with torch.no_grad():
        means = {"approx_kl": ratio - 1 - log_ratio, "clip_fraction": active.float(), "ratio": ratio}
        if dual is not None:
            means["dual_clip_fraction"] = dual.float()
        if weights is not None:
            means["behaviour_weight"] = weights
            if settings.tis_cap is not None:
                means["tis_fraction"] = (weights >= settings.tis_cap).float()
            if settings.rejects:
                means["rejected_fraction"] = (weights == 0).float()
        metrics = {"actor/policy_loss": policy_loss.detach()}
        metrics |= {f"actor/{name}": _mean(tensor, mask, inputs.token_total) for name, tensor in means.items()}
        metrics["actor/ratio_max"] = torch.where(broadcast_mask(mask, ratio), ratio, 0).amax()
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


def as_loss(result: Loss | Tensor, inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the result of a loss function as a `Loss`.

    A tensor holds one loss per log-probability. The policy loss is its mean over the entries that count, by
    `loss_agg_func`; corrections, the entropy bonus, the KL from the reference, the value loss (if there are returns)
    and the metrics are added as in `actor_critic`.

    Raises:
        TypeError: the result is neither a `Loss` nor a tensor, or a metric is not a scalar tensor.
        ValueError: the shape of the tensor is not that of `inputs.logprobs`, or the loss is not a scalar.
    """
    made = cast("object", result.loss if isinstance(result, Loss) else result)
    if not isinstance(made, Tensor):
        subject = "`Loss.loss` is" if isinstance(result, Loss) else "a loss of your own returned"
        raise TypeError(
            f"{subject} a `{type(made).__name__}`; expected a tensor with one number for each of `inputs.logprobs`, or"
            " a `Loss` of a scalar tensor"
        )
    if isinstance(result, Loss):
        if made.numel() != 1:
            raise ValueError(f"`Loss.loss` has the shape {list(made.shape)}; expected a scalar: use `aggregate`")
        figures: dict[str, object] = dict(result.metrics)
        for name, value in figures.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise TypeError(f"the metric `{name}` of a loss is not a scalar tensor: `{short_repr(value)}`")
        return result
    if result.shape != inputs.logprobs.shape:
        raise ValueError(
            f"a loss of your own returned a tensor {list(result.shape)}; expected {list(inputs.logprobs.shape)}, one"
            " number for each of `inputs.logprobs`, or a `Loss`"
        )
    none = torch.zeros_like(result, dtype=torch.bool)
    policy = _policy_loss(
        inputs,
        settings,
        inputs.logprobs - inputs.old_logprobs,
        _asked_correction(inputs, settings),
        lambda ratio, advantages: (result, none, None),
    )
    return policy if inputs.returns is None else _with_values(policy, inputs, settings)


def _clip_of(settings: LossSettings) -> _Surrogate:
    """Return PPO's clipped surrogate with the bounds of the settings."""

    def surrogate(ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        low, high, dual = settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c
        losses, active, bounded = clipped_policy_losses(ratio, advantages, low, high, dual)
        return losses, active, None if dual is None else bounded

    return surrogate


def _mean(values: Tensor, mask: Tensor | None, total: Tensor | float | None) -> Tensor:
    """Return the mean of the values that count; with `total`, this part's share of the whole batch's mean."""
    return masked_mean(values, mask) if total is None else aggregate(values, mask, "token-mean", total)


def actor_critic(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of `actor` plus `value_weight` times the value loss.

    Raises:
        ValueError: values, old values or returns are missing.
    """
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise ValueError("`loss_type: actor_critic` needs values, old values and returns")
    return _with_values(actor(inputs, settings), inputs, settings)


def _with_values(policy: Loss, inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of a policy plus `value_weight` times the value loss."""
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise ValueError("the value loss needs values, old values and returns")
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


def huber(errors: Tensor, delta: float | None) -> Tensor:
    """Return e^2 / 2 up to |e| = delta, and delta (|e| - delta / 2) beyond, the shape of `errors`.

    If `delta` is None, return e^2 / 2.
    """
    if delta is None:
        return errors.square() / 2
    size = errors.abs()
    return torch.where(size <= delta, errors.square() / 2, delta * (size - delta / 2))


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None, huber_delta: float | None
) -> tuple[Tensor, Tensor]:
    """Return the larger of the value's loss and the loss of the value clipped to `value_clip` around its old value.

    As in the implementation of the PPO paper (OpenAI baselines, `ppo2`), but with the Huber loss for the square.

    Args:
        values: float [...], with gradients.
        old_values: float [...], the values when the samples were made.
        returns: float [...], the targets of the values.
        value_clip: the largest change of a value; None: no clip.
        huber_delta: the error from which the loss grows linearly; None: the loss is quadratic.

    Returns:
        The losses, and where the clipped loss was the larger; each [...].
    """
    plain = huber(returns - values, huber_delta)
    if value_clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    clipped = huber(returns - near, huber_delta)
    return torch.maximum(plain, clipped), clipped > plain


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    settings: LossSettings,
    mask: Tensor | None = None,
    total: Tensor | float | None = None,
) -> Loss:
    """Return the mean of `clipped_value_loss` over the values that count.

    Args:
        values, old_values, returns: see `clipped_value_loss`.
        settings: only `value_clip` and `huber_delta` are used.
        mask: bool, the shape of `values` or its leading dimensions; None: everything counts.
        total: the number of values that count in the whole batch if this is a part of it (`LossInputs.value_total`).
    """
    losses, clipped = clipped_value_loss(values, old_values, returns, settings.value_clip, settings.huber_delta)
    loss = aggregate(losses, mask, "token-mean", total)
    fraction = aggregate(clipped.float(), mask, "token-mean", total)
    return Loss(loss, {"critic/value_loss": loss.detach(), "critic/value_clip_fraction": fraction})
