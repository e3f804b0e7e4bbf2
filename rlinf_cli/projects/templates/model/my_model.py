"""A policy: every number of an action is drawn from a normal distribution, whose mean a small network computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from recipes.embodied import ActionEval, BasePolicy, EmbodiedModelConfig, EnvSpec, PolicyOutput
from rlinf_core import ConfigError


class Gaussian(BasePolicy):
    """A policy of states. An answer is a chunk of C actions with D numbers each.

    Args:
        config: the section `actor.model`.
        spec: sizes of the environment's observations and actions.
    """

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        if not spec.state_size or spec.num_choices is not None:
            raise ConfigError("`Gaussian` needs states, and actions that are numbers")
        self.chunk = (config.num_action_chunks, spec.action_size)
        width = config.hidden_dim
        self.mean = nn.Sequential(
            nn.Linear(spec.state_size, width), nn.Tanh(), nn.Linear(width, self.chunk[0] * self.chunk[1])
        )
        self.log_std = nn.Parameter(torch.full((spec.action_size,), -0.5))
        self.critic: nn.Sequential | None = None
        if config.add_value_head:
            self.critic = nn.Sequential(nn.Linear(spec.state_size, width), nn.Tanh(), nn.Linear(width, 1))

    @torch.no_grad()
    def act(
        self, inputs: dict[str, Tensor], *, greedy: bool = False, generator: torch.Generator | None = None
    ) -> PolicyOutput:
        """Draw actions [n, C, D], where rollouts are made."""
        normal = self._distribution(inputs)
        noise = torch.randn(normal.mean.shape, generator=generator, device=normal.mean.device)
        actions = normal.mean if greedy else normal.mean + noise * normal.stddev
        return PolicyOutput(actions, normal.log_prob(actions), self._values(inputs))

    def forward(self, inputs: dict[str, Tensor], actions: Tensor) -> ActionEval:
        """Evaluate actions that `act` drew, with gradients, where training happens."""
        normal = self._distribution(inputs)
        return ActionEval(normal.log_prob(actions), normal.entropy(), self._values(inputs))

    @torch.no_grad()
    def values(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return values [n, 1]."""
        values = self._values(inputs)
        if values is None:
            raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
        return values

    def _distribution(self, inputs: dict[str, Tensor]) -> Normal:
        mean = self.mean(inputs["states"]).view(-1, *self.chunk)
        return Normal(mean, self.log_std.exp().expand_as(mean))

    def _values(self, inputs: dict[str, Tensor]) -> Tensor | None:
        return None if self.critic is None else self.critic(inputs["states"])
