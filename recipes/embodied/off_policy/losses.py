"""Parts of losses and updates that several off-policy algorithms share.

Critics are an ensemble of E functions of an observation and an action; `values` [E, n] are their outputs for n
transitions. The minimum over a part of the ensemble is from REDQ, Chen et al. 2021 (arXiv 2101.05982).
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlinf_core import Loss

Module = TypeVar("Module", bound=nn.Module)


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
        discounts: float [n], 0 where the task ended; a truncated episode has a next value.
        next_values: float [E, n], of the chosen critics and the next action.
        next_logprobs: float [n], of the next action; None: no entropy is added.
        temperature: the weight of the entropy.

    Returns:
        float [n], without gradients.
    """
    with torch.no_grad():
        following = next_values.amin(dim=0)
        if next_logprobs is not None:
            following = following - temperature * next_logprobs
        return rewards + discounts * following


def ensemble_loss(values: Tensor, targets: Tensor) -> Loss:
    """Return the squared errors of all critics, halved, as a sum over critics and a mean over transitions.

    Args:
        values: float [E, n], with gradients.
        targets: float [n].
    """
    loss = ((values - targets).square() / 2).mean(dim=1).sum()
    detached = values.detach()
    metrics = {
        "critic/loss": loss.detach(),
        "critic/value": detached.mean(),
        "critic/spread": detached.std(dim=0, correction=0).mean(),
        "critic/target": targets.mean(),
    }
    return Loss(loss, metrics)


@torch.no_grad()
def copy_weights(targets: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Copy weights into others, in place."""
    for target, weight in zip(targets, weights, strict=True):
        target.copy_(weight)


@torch.no_grad()
def move_toward(targets: Sequence[Tensor], weights: Sequence[Tensor], rate: float) -> None:
    """Move target weights toward the current ones, in place: target += rate * (weight - target)."""
    # One kernel for all tensors; despite its private name, torch's averaged models use it, too.
    torch._foreach_lerp_(list(targets), list(weights), rate)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def frozen_copy(module: Module) -> Module:
    """Return a copy of a module without gradients."""
    return copy.deepcopy(module).requires_grad_(False)


@contextmanager
def without_gradients(weights: Sequence[Tensor]) -> Generator[None, None, None]:
    """Disable gradients of some weights in this block; gradients still flow through operations on them."""
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
