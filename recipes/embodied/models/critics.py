"""An ensemble of critics, i.e. values of an observation and an action, computed together, and parts of their losses.

Critics are E functions; `values` [E, n] are their outputs for n transitions. The minimum over a part of the ensemble is
from REDQ, Chen et al. 2021 (arXiv 2101.05982).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.config.model_config import CONVOLUTIONS, ImageFeatures
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.squashed_policy import (
    FEATURES,
    StateFeatures,
    features_from,
    features_of,
    relu_layers,
)
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


# The normalization of hidden layers: none; each sample over its units (RLPD); each unit over the batch (CrossQ).
Norm: TypeAlias = Literal["none", "layer", "batch"]
_EPSILON: Final = 1e-5


class EnsembleLinear(nn.Module):
    """E linear layers side by side, with the initial weights of `nn.Linear`."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [E, n, outputs] of [E, n, inputs]."""
        return torch.baddbmm(self.bias, inputs, self.weight)


class EnsembleLayerNorm(nn.Module):
    """Layer normalization with weights of each member."""

    def __init__(self, members: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, size))
        self.bias = nn.Parameter(torch.zeros(members, 1, size))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [E, n, size], each row with mean 0 and standard deviation 1 before the weights."""
        return torch.addcmul(self.bias, functional.layer_norm(inputs, inputs.shape[-1:], eps=_EPSILON), self.weight)


# Constants of batch renormalization in CrossQ.
_MOMENTUM: Final = 0.01
_LARGEST_SCALE: Final = 3.0
_LARGEST_SHIFT: Final = 5.0


class BatchRenorm(nn.Module):
    """Batch renormalization (Ioffe 2017, arXiv 1702.03275) of each member, as in CrossQ (arXiv 1902.05605).

    In training a unit is normalized by its batch, and corrected toward the running statistics by a bounded scale and
    shift, without gradients. The first `warmup` batches use plain batch normalization.
    """

    mean: Tensor
    deviation: Tensor
    batches: Tensor

    def __init__(self, members: int, size: int, *, warmup: int = 10_000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, size))
        self.bias = nn.Parameter(torch.zeros(members, 1, size))
        self.register_buffer("mean", torch.zeros(members, 1, size))
        self.register_buffer("deviation", torch.ones(members, 1, size))
        self.register_buffer("batches", torch.zeros(()))
        self._warmup = warmup

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [E, n, size], normalized over n in training, else by the running statistics."""
        if not self.training:
            return torch.addcmul(self.bias, (inputs - self.mean) / self.deviation, self.weight)
        mean = inputs.mean(dim=1, keepdim=True)
        deviation = (inputs.var(dim=1, keepdim=True, correction=0) + _EPSILON).sqrt()
        normalized = (inputs - mean) / deviation
        with torch.no_grad():
            scale = (deviation / self.deviation).clamp(1 / _LARGEST_SCALE, _LARGEST_SCALE)
            shift = ((mean - self.mean) / self.deviation).clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)
            warm = (self.batches >= self._warmup).float()
            scale, shift = torch.lerp(torch.ones_like(scale), scale, warm), shift * warm
            # A batch whose update is skipped because it overflows would stay in the statistics forever.
            is_finite = mean.isfinite() & deviation.isfinite()
            self.mean.lerp_(torch.where(is_finite, mean, self.mean), _MOMENTUM)
            self.deviation.lerp_(torch.where(is_finite, deviation, self.deviation), _MOMENTUM)
            self.batches += 1
        return torch.addcmul(self.bias, normalized * scale + shift, self.weight)


class Critics(nn.Module):
    """E critics on states or images.

    All members share one network from images to features.

    Args:
        spec: the spec of the environment.
        members: E.
        width: the width of the hidden layers.
        layers: the number of layers.
        norm: see `Norm`.
        judges_states: whether there is also a network, without `norm`, for values of observations alone.
        images: how images become features.

    Attributes:
        normalization: the policy's normalization of states, which the policy saves.
    """

    normalization: Normalization = Normalization()

    def __init__(
        self,
        spec: EnvSpec,
        members: int,
        width: int,
        layers: int = 2,
        norm: Norm = "none",
        *,
        judges_states: bool = False,
        images: ImageFeatures = CONVOLUTIONS,
    ) -> None:
        super().__init__()
        self.members = members
        self.features, size = features_of(spec, width, images)
        self.states: nn.Module | None = None
        if judges_states:
            hidden = relu_layers(size, width, layers)
            self.states = nn.Sequential(hidden, nn.Linear(width, 1))
        size += spec.action_size
        # By this name the optimizer recognizes weights of values, which get `value_lr`.
        self.critic = nn.ModuleList()
        if norm == "batch":
            self.critic.append(BatchRenorm(members, size))
        for _ in range(layers):
            self.critic.append(EnsembleLinear(members, size, width))
            # Layer norm comes before the activation (RLPD), batch renorm after it (CrossQ).
            self.critic.extend([EnsembleLayerNorm(members, width)] if norm == "layer" else [])
            self.critic.append(nn.ReLU())
            self.critic.extend([BatchRenorm(members, width)] if norm == "batch" else [])
            size = width
        self.critic.append(EnsembleLinear(members, size, 1))

    def forward(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """Return values, float32 [E, n], of actions [n, A]."""
        hidden = torch.cat((self._features_of(inputs), actions), dim=-1).expand(self.members, -1, -1)
        for layer in self.critic:
            hidden = layer(hidden)
        return hidden[:, :, 0]

    def encoded(self, inputs: Inputs) -> Inputs:
        """Return inputs with features of images, which the policy shares; without images the inputs themselves."""
        if isinstance(self.features, StateFeatures):
            return inputs
        return {**inputs, FEATURES: self._features_of(inputs)}

    def of_states(self, inputs: Inputs) -> Tensor:
        """Return values of observations, float32 [n].

        Raises:
            ValueError: these critics have no values of states.
        """
        if self.states is None:
            raise ValueError("these critics judge actions alone: `judges_states` is false")
        return self.states(self._features_of(inputs))[:, 0]

    def _features_of(self, inputs: Inputs) -> Tensor:
        return features_from(self.features, self.normalization, inputs)
