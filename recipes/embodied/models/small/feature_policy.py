"""Base of `mlp_policy` and `cnn_policy`: a policy and a value function on features of an observation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import STATES
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.heads import OrthogonalLinear, action_head
from recipes.training.arrays import Array

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig


class FeaturePolicy(BasePolicy):
    """Separate networks for actions and for values.

    Values are one for each action of a chunk (V = C). A subclass hands in the networks from `inputs` to features.
    """

    loads_model_path = False

    def __init__(
        self, config: EmbodiedModelConfig, spec: EnvSpec, actor: nn.Module, critic: nn.Module, features: int
    ) -> None:
        super().__init__()
        self.actor = actor
        self.head = action_head(features, config.num_action_chunks, spec)
        self.critic: nn.Module | None = None
        if config.add_value_head:
            self.critic = nn.Sequential(critic, OrthogonalLinear(features, config.num_action_chunks, 1.0))

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`; states are normalized."""
        inputs = super().prepare(observations)
        if STATES in inputs:
            inputs[STATES] = self.normalization.normalized_states(inputs[STATES])
        return inputs

    def to_env(self, actions: Tensor) -> Array:
        """See `BasePolicy`."""
        return super().to_env(self.normalization.actions_of(actions))

    def from_env(self, actions: Array) -> Tensor:
        """See `BasePolicy`."""
        return self.normalization.normalized_actions(super().from_env(actions))

    def greedy(self, observations: Inputs) -> Tensor:
        """See `BasePolicy`."""
        inputs = dict(observations)
        if STATES in inputs:
            inputs[STATES] = self.normalization.normalized_states(inputs[STATES])
        return self.normalization.actions_of(self.head.likeliest(self.features_of(inputs, self.actor)))

    def features_of(self, inputs: Inputs, network: nn.Module) -> Tensor:
        """Return features of the inputs by `network`, [n, F]."""
        return network(inputs["states"])

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`."""
        actions, logprobs = self.head.draw(self.features_of(inputs, self.actor), greedy, generator)
        return PolicyOutput(actions, logprobs, None if self.critic is None else self.features_of(inputs, self.critic))

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`."""
        logprobs, entropy = self.head(self.features_of(inputs, self.actor), actions)
        return ActionEval(logprobs, entropy, None if self.critic is None else self.features_of(inputs, self.critic))

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`."""
        if self.critic is None:
            raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
        return self.features_of(inputs, self.critic)
