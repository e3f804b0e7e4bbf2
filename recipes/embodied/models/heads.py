"""Layers and action distributions of the small policies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from recipes.embodied.envs.env_spec import EnvSpec

INITIAL_LOG_STD = -0.5
_LOG_SQRT_TAU = math.log(2 * math.pi) / 2


class OrthogonalLinear(nn.Linear):
    """A layer with orthogonal initial weights of the given gain, and no bias."""

    def __init__(self, inputs: int, outputs: int, gain: float = math.sqrt(2)) -> None:
        super().__init__(inputs, outputs)
        nn.init.orthogonal_(self.weight, gain)
        nn.init.zeros_(self.bias)


def hidden_layers(inputs: int, width: int) -> nn.Sequential:
    """Return two tanh layers, as is usual for PPO on states."""
    return nn.Sequential(OrthogonalLinear(inputs, width), nn.Tanh(), OrthogonalLinear(width, width), nn.Tanh())


def value_head(inputs: int, width: int) -> nn.Sequential:
    """Return a head for one value, with a hidden tanh layer."""
    return nn.Sequential(OrthogonalLinear(inputs, width), nn.Tanh(), OrthogonalLinear(width, 1, 1.0))


def with_value_head(values: Tensor | None) -> Tensor:
    """Return the values, which must not be None.

    Raises:
        ValueError: the policy has no value head.
    """
    if values is None:
        raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
    return values


class ActionHead(nn.Module, ABC):
    """A network from features [n, F] to a distribution over chunks of C actions of D tokens."""

    @abstractmethod
    def draw(self, features: Tensor, greedy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Draw actions; return them and their log-probabilities, both [n, C, D]."""

    @abstractmethod
    def likeliest(self, features: Tensor) -> Tensor:
        """Return the likeliest actions, [n, C, D]."""

    @abstractmethod
    def forward(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of actions, and entropies; both [n, C, D]."""


class GaussianHead(ActionHead):
    """Independent normal distributions, whose stds are weights, equal for all observations."""

    def __init__(self, features: int, chunk: int, size: int) -> None:
        super().__init__()
        self.shape = (chunk, size)
        self.mean = OrthogonalLinear(features, chunk * size, 0.01)
        self.log_std = nn.Parameter(torch.full((chunk, size), INITIAL_LOG_STD))

    def draw(self, features: Tensor, greedy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        mean = self._mean(features)
        noise = torch.zeros_like(mean)
        if not greedy:
            noise.normal_(generator=generator)
        return mean + self.log_std.exp() * noise, -noise.square() / 2 - self.log_std - _LOG_SQRT_TAU

    def likeliest(self, features: Tensor) -> Tensor:
        return self._mean(features)

    def forward(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        away = (actions - self._mean(features)) * (-self.log_std).exp()
        entropy = (0.5 + _LOG_SQRT_TAU + self.log_std).expand_as(actions)
        return -away.square() / 2 - self.log_std - _LOG_SQRT_TAU, entropy

    def _mean(self, features: Tensor) -> Tensor:
        return self.mean(features).view(-1, *self.shape)


class ChoiceHead(ActionHead):
    """A categorical distribution over discrete actions, for each action of a chunk."""

    def __init__(self, features: int, chunk: int, choices: int) -> None:
        super().__init__()
        self.shape = (chunk, choices)
        self.logits = OrthogonalLinear(features, chunk * choices, 0.01)

    def draw(self, features: Tensor, greedy: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        logprobs = self._logprobs(features)
        if greedy:
            actions = logprobs.argmax(dim=-1, keepdim=True)
        else:
            # The argmax of logits plus Gumbel noise is a sample; minus the log of exponential noise is Gumbel noise.
            noise = torch.empty_like(logprobs).exponential_(generator=generator)
            actions = (logprobs - noise.log()).argmax(dim=-1, keepdim=True)
        return actions, logprobs.gather(-1, actions)

    def likeliest(self, features: Tensor) -> Tensor:
        return self._logprobs(features).argmax(dim=-1, keepdim=True)

    def forward(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = self._logprobs(features)
        return logprobs.gather(-1, actions), -(logprobs.exp() * logprobs).sum(dim=-1, keepdim=True)

    def _logprobs(self, features: Tensor) -> Tensor:
        return self.logits(features).view(-1, *self.shape).log_softmax(dim=-1)


def action_head(features: int, chunk: int, spec: EnvSpec) -> ActionHead:
    """Return the head for the environment's kind of actions."""
    if spec.num_choices is None:
        return GaussianHead(features, chunk, spec.action_size)
    return ChoiceHead(features, chunk, spec.num_choices)
