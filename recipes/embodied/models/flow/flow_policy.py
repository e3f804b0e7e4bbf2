"""A policy by flow matching on states or images: it turns noise into a chunk of actions, in a few steps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import FlowOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import STATES
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.flow.flow_base import FlowMatchingPolicy, check_horizon, flow_sde
from recipes.embodied.models.flow.flow_matching import Velocity
from recipes.embodied.models.heads import OrthogonalLinear, hidden_layers, with_value_head
from recipes.embodied.models.small.feature_policy import SCALED_IMAGES, ImageEncoder
from rlinf_core import ConfigError

_FREQUENCIES = 8


class FlowPolicy(FlowMatchingPolicy):
    """Flow matching of chunks by small networks, with one value per action of a chunk."""

    options_model = FlowOptions
    loads_model_path = False

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        if spec.num_choices is not None:
            raise ConfigError("`flow_policy` needs continuous actions", help="use `mlp_policy` or `cnn_policy`")
        options, width = cast("FlowOptions", config.options), config.hidden_dim
        horizon = options.action_horizon or config.num_action_chunks
        check_horizon(config.num_action_chunks, horizon)
        shape = (config.num_action_chunks, spec.action_size)
        super().__init__(flow_sde(options, options.steps), shape, horizon=horizon)
        self._has_states = spec.state_size > 0
        self.actor = _Encoder(spec, width)
        chunk = self.horizon * spec.action_size
        self.velocity = nn.Sequential(
            OrthogonalLinear(width + chunk + 2 * _FREQUENCIES, 2 * width),
            nn.SiLU(),
            OrthogonalLinear(2 * width, 2 * width),
            nn.SiLU(),
            OrthogonalLinear(2 * width, chunk, 0.1),
        )
        self.critic: nn.Module | None = None
        if config.add_value_head:
            self.critic = nn.Sequential(_Encoder(spec, width), OrthogonalLinear(width, config.num_action_chunks, 1.0))

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: normalizes states, and leaves images unchanged."""
        if self._has_states:
            states = self.normalization.normalized_states(observations[STATES])
            observations = {**observations, STATES: states.astype(np.float32)}
        return super().prepare(observations)

    def describe_images(self) -> dict[str, Any]:
        """See `BasePolicy`."""
        return SCALED_IMAGES if self.actor.has_images else {}

    def greedy(self, observations: Inputs) -> Tensor:
        """See `BasePolicy`: the end of the flow from 0."""
        inputs = dict(observations)
        if self._has_states:
            inputs[STATES] = self.normalization.normalized_states(inputs[STATES])
        features = self.actor(inputs)
        zero = features.new_zeros((features.shape[0], self.horizon, self.shape[1]))
        samples = self.sde.follow(partial(self._flow, features), zero)
        return self.normalization.actions_of(samples[:, : self.shape[0]])

    def see(self, inputs: Inputs) -> Tensor:
        """See `FlowMatchingPolicy`: features of the observation, [n, width]."""
        return self.actor(inputs)

    def velocity_of(self, seen: Tensor, inputs: Inputs) -> Velocity:
        """See `FlowMatchingPolicy`."""
        return partial(self._flow, seen)

    def values_of(self, seen: Tensor | None, inputs: Inputs) -> Tensor | None:
        """See `FlowMatchingPolicy`: a separate network, one value per action of a chunk."""
        return None if self.critic is None else self.critic(inputs)

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`; does not run the network of actions."""
        return with_value_head(self.values_of(None, inputs))

    def _flow(self, features: Tensor, chunk: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * (math.pi * 2.0 ** torch.arange(_FREQUENCIES, device=time.device)) / 2
        inputs = torch.cat((features, chunk.flatten(1), angles.sin(), angles.cos()), dim=1)
        return self.velocity(inputs).view_as(chunk)


class _Encoder(nn.Module):
    """Features of images and states, or of states alone."""

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
