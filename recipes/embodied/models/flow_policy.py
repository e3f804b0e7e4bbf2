"""A policy by flow matching on states or images: it turns noise into a chunk of actions, in a few steps."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.embodied.envs.keys import STATES
from recipes.embodied.envs.types import EnvSpec, Observation
from recipes.embodied.model_options import FlowOptions
from recipes.embodied.models.base import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.cnn_policy import SCALED_IMAGES, ImageEncoder
from recipes.embodied.models.flow_matching import FlowSde, flow_matching_losses
from recipes.embodied.models.heads import hidden_layers, linear
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig

_FREQUENCIES = 8


class FlowPolicy(BasePolicy):
    """Flow matching of chunks; for reinforcement learning with noise at each of K steps (`flow_matching`).

    An action that was drawn is its whole way from noise: D = (K + 1) * A numbers, of which the environment takes the
    last A. Values are one for each action of a chunk.
    """

    options_model = FlowOptions
    loads_model_path = False

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        if spec.num_choices is not None:
            raise ConfigError("`flow_policy` needs actions that are numbers", help="use `mlp_policy` or `cnn_policy`")
        options, width = cast("FlowOptions", config.options), config.hidden_dim
        self._sde = FlowSde(options.steps, options.noise)
        self._shape = (config.num_action_chunks, spec.action_size)
        self._has_states = spec.state_size > 0
        self.actor = _Encoder(spec, width)
        chunk = math.prod(self._shape)
        self.velocity = nn.Sequential(
            linear(width + chunk + 2 * _FREQUENCIES, 2 * width),
            nn.SiLU(),
            linear(2 * width, 2 * width),
            nn.SiLU(),
            linear(2 * width, chunk, 0.1),
        )
        self.critic: nn.Module | None = None
        if config.add_value_head:
            self.critic = nn.Sequential(_Encoder(spec, width), linear(width, config.num_action_chunks, 1.0))

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: states normalized, images as they are."""
        if self._has_states:
            states = self.normalization.normalized_states(observations[STATES])
            observations = {**observations, STATES: states.astype(np.float32)}
        return super().prepare(observations)

    def describe_images(self) -> dict[str, Any]:
        """See `BasePolicy`."""
        return SCALED_IMAGES if self.actor.has_images else {}

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        """See `BasePolicy`: the ends of the chains, [n, C, A]."""
        last = actions[..., -self._shape[1] :].cpu().numpy()
        return self.normalization.actions_of(last).astype(np.float32)

    def from_env(self, actions: NDArray[Any]) -> Tensor:
        """See `BasePolicy`: demonstrated actions are ends alone, [n, C, A]; `imitation_losses` takes them."""
        return super().from_env(self.normalization.normalized_actions(actions).astype(np.float32))

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`: greedy is the flow from 0, without noise."""
        velocity = self._velocity(inputs)
        zero = torch.zeros(len(next(iter(inputs.values()))), *self._shape, device=next(self.parameters()).device)
        chain = self._sde.follow(velocity, zero) if greedy else self._sde.draw(velocity, zero, generator)
        logprobs = self._sde.logprobs(velocity, chain)
        return PolicyOutput(_flat(chain), _flat(logprobs), None if self.critic is None else self.critic(inputs))

    def greedy(self, observations: Inputs) -> Tensor:
        """See `BasePolicy`: the end of the flow from 0."""
        inputs = dict(observations)
        if self._has_states:
            inputs[STATES] = self.normalization.normalized_states(inputs[STATES])
        features = self.actor(inputs)
        zero = features.new_zeros((features.shape[0], *self._shape))
        return self.normalization.actions_of(self._sde.follow(partial(self._flow, features), zero)[-1])

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`."""
        chunk, size = self._shape
        chain = actions.view(-1, chunk, self._sde.steps + 1, size).permute(2, 0, 1, 3)
        logprobs = self._sde.logprobs(self._velocity(inputs), chain)
        entropy = self._sde.entropies(chain[0])
        return ActionEval(_flat(logprobs), _flat(entropy), None if self.critic is None else self.critic(inputs))

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`."""
        if self.critic is None:
            raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
        return self.critic(inputs)

    def imitation_losses(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """See `BasePolicy`: the squared errors of the velocity, [n, C, A]."""
        return flow_matching_losses(self._velocity(inputs), actions)

    def _velocity(self, inputs: Inputs) -> Any:
        """Return the velocity as a function of a chunk and the time; what is seen is encoded once."""
        return partial(self._flow, self.actor(inputs))

    def _flow(self, features: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * (math.pi * 2.0 ** torch.arange(_FREQUENCIES, device=time.device)) / 2
        given = torch.cat((features, chunk.flatten(1), angles.sin(), angles.cos()), dim=1)
        return self.velocity(given).view_as(chunk)


class _Encoder(nn.Module):
    """Features of images, and of states beside them; or of states alone."""

    def __init__(self, spec: EnvSpec, width: int) -> None:
        super().__init__()
        self.has_images = bool(spec.cameras)
        self.network = (
            ImageEncoder(spec.cameras, spec.state_size, width)
            if spec.cameras
            else hidden_layers(spec.state_size, width)
        )

    def forward(self, inputs: Inputs) -> Tensor:
        """Return features, [n, width]."""
        return self.network(inputs if self.has_images else inputs[STATES])


def _flat(chain: Tensor) -> Tensor:
    """Return [K + 1, n, C, A] as [n, C, (K + 1) * A]."""
    return chain.permute(1, 2, 0, 3).flatten(2)
