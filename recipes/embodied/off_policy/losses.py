"""Losses of off-policy actor-critic methods: SAC, TD3 and their descendants.

Critics are an ensemble of E functions of an observation and an action; `values` [E, n] are what they say of n
transitions. Sources: SAC, Haarnoja et al. 2018 (arXiv 1812.05905); TD3, Fujimoto et al. 2018 (arXiv 1802.09477); the
minimum over some of an ensemble, REDQ, Chen et al. 2021 (arXiv 2101.05982); IQL, Kostrikov et al. 2021 (arXiv
2110.06169).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from rlinf_core import Loss

# How the values of an ensemble become one: the smallest, or the mean.
Reduction: TypeAlias = Literal["min", "mean"]


def reduced(values: Tensor, how: Reduction) -> Tensor:
    """Return the values of an ensemble [E, n] as one for each transition, [n]."""
    return values.amin(dim=0) if how == "min" else values.mean(dim=0)


def bootstrapped_targets(
    rewards: Tensor,
    discounts: Tensor,
    next_values: Tensor,
    next_logprobs: Tensor | None = None,
    temperature: Tensor | float = 0.0,
) -> Tensor:
    """Return rewards + discounts * (min over critics of the next values - temperature * next log-probabilities).

    Args:
        rewards: float [n], over one step or several.
        discounts: float [n], 0 where the task ended; an episode that was cut off has a next value.
        next_values: float [E, n], of the critics that count, of the action chosen next.
        next_logprobs: float [n], of that action; None: no entropy is added.
        temperature: the weight of the entropy.

    Returns:
        float [n], without gradients.
    """
    with torch.no_grad():
        following = next_values.amin(dim=0)
        if next_logprobs is not None:
            following = following - temperature * next_logprobs
        return rewards + discounts * following


def ensemble_loss(values: Tensor, targets: Tensor, weights: Tensor | None = None) -> Loss:
    """Return the squared errors of all critics, halved, as a sum over critics and a mean over transitions.

    Args:
        values: float [E, n], with gradients.
        targets: float [n].
        weights: float [n], corrections of prioritised sampling; None: 1.
    """
    errors = (values - targets).square() / 2
    loss = (errors if weights is None else errors * weights).mean(dim=1).sum()
    detached = values.detach()
    metrics = {
        "critic/loss": loss.detach(),
        "critic/value": detached.mean(),
        "critic/spread": detached.std(dim=0, correction=0).mean(),
        "critic/target": targets.mean(),
    }
    return Loss(loss, metrics)


def soft_policy_loss(logprobs: Tensor, values: Tensor, temperature: Tensor | float, how: Reduction = "min") -> Loss:
    """Return the mean of temperature * log-probability - value, which SAC's policy descends.

    Args:
        logprobs: float [n], of actions drawn by the policy, with gradients.
        values: float [E, n], of these actions, with gradients through them.
        temperature: the weight of the entropy.
        how: see `reduced`.
    """
    loss = (temperature * logprobs - reduced(values, how)).mean()
    return Loss(loss, {"actor/policy_loss": loss.detach(), "actor/entropy": -logprobs.detach().mean()})


def deterministic_policy_loss(values: Tensor) -> Loss:
    """Return minus the mean value of the first critic, which TD3's policy descends; `values` [E, n]."""
    loss = -values[0].mean()
    return Loss(loss, {"actor/policy_loss": loss.detach()})


def cloning_policy_loss(values: Tensor, actions: Tensor, recorded: Tensor, scale: float) -> Loss:
    """Return the mean squared distance from recorded actions, minus the value of the policy's own, which TD3+BC's
    policy descends (Fujimoto and Gu 2021, arXiv 2106.06860, eq. 5).

    Args:
        values: float [E, n], of the policy's actions, with gradients through them; the first critic's count.
        actions: float [n, A], of the policy, with gradients.
        recorded: float [n, A], of the data.
        scale: alpha: values are multiplied by alpha over the mean size of a value.
    """
    first = values[0]
    weight = scale / first.detach().abs().mean().clamp(min=torch.finfo(first.dtype).eps)
    away = (actions - recorded).square().mean()
    loss = away - weight * first.mean()
    metrics = {"actor/policy_loss": loss.detach(), "actor/bc_loss": away.detach()}
    return Loss(loss, metrics)


def expectile_loss(values: Tensor, targets: Tensor, expectile: float) -> Loss:
    """Return the mean of |expectile - (error < 0)| * error^2, with error = target - value (IQL, eq. 5).

    Above 0.5 a value is near the larger ones of its targets, which are those of good actions.

    Args:
        values: float [n], of observations, with gradients.
        targets: float [n], of the recorded actions, without.
        expectile: tau, from 0 to 1.
    """
    errors = targets - values
    loss = (torch.where(errors < 0, 1 - expectile, expectile) * errors.square()).mean()
    return Loss(loss, {"critic/expectile_loss": loss.detach(), "critic/state_value": values.detach().mean()})


# Of a recorded action, in IQL.
_LARGEST_WEIGHT: Final = 100.0


def advantage_weighted_loss(logprobs: Tensor, advantages: Tensor, scale: float) -> Loss:
    """Return minus the mean log-probability of recorded actions, each weighted by min(exp(scale * advantage), 100)
    (IQL, eq. 7; the bound is that of its code).

    Args:
        logprobs: float [n], of recorded actions, with gradients.
        advantages: float [n], without.
        scale: beta.
    """
    weights = (scale * advantages).exp().clamp(max=_LARGEST_WEIGHT)
    loss = -(weights * logprobs).mean()
    return Loss(loss, {"actor/policy_loss": loss.detach(), "actor/advantage_weight": weights.mean()})


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """Return the temperature loss, which raises the temperature while the entropy is below its target (SAC, eq. 18).

    As is usual, the loss takes the log-temperature in place of the temperature, so that the step size does not depend
    on it.

    Args:
        log_temperature: a scalar, with gradients.
        logprobs: float [n], of actions drawn by the policy.
        target_entropy: the target entropy in nats.
    """
    return -(log_temperature * (logprobs.detach() + target_entropy)).mean()


@torch.no_grad()
def copy_weights(targets: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Copy weights into others, in place."""
    for target, weight in zip(targets, weights, strict=True):
        target.copy_(weight)


@torch.no_grad()
def move_toward(targets: Sequence[Tensor], weights: Sequence[Tensor], rate: float) -> None:
    """Move target weights toward the current ones, in place: target += rate * (weight - target)."""
    # One kernel for all of them; it is public in all but its name, and torch's own averaged models use it.
    torch._foreach_lerp_(list(targets), list(weights), rate)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
