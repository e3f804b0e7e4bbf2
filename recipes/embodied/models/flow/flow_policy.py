"""Policies by flow matching, and the one on states or images: they turn noise into actions, in a few steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_options import FlowOptions, FlowVlaOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import STATES
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.flow.flow_matching import FlowSde, OneStepSde, Velocity, flow_matching_losses
from recipes.embodied.models.heads import OrthogonalLinear, hidden_layers, with_value_head
from recipes.embodied.models.small.feature_policy import SCALED_IMAGES, ImageEncoder
from recipes.training.arrays import Array
from rlinf_core import ConfigError


class FlowMatchingPolicy(BasePolicy):
    """Flow matching of chunks; for reinforcement learning with noise at denoising steps (`flow_matching`).

    The network leads noise to H actions of M numbers. The environment takes the first C of the actions, and of each
    the first A numbers: a network may look further ahead than is acted, and have room for more numbers than the
    environment's actions have. The flow leads those to 0.

    An action that was drawn is what `FlowSde` records of it: [n, H, R * M], the action itself last. Its
    log-probabilities are those of what is carried out, at S steps: [n, C, S * A]. What noise in the other numbers does
    to later steps is left out of them.

    Args:
        sde: the denoising steps.
        shape: C and A.
        width: M; None: A.
        horizon: H; None: C.
    """

    def __init__(
        self, sde: FlowSde, shape: tuple[int, int], width: int | None = None, horizon: int | None = None
    ) -> None:
        super().__init__()
        self.sde = sde
        self.shape = shape
        self._width = shape[1] if width is None else width
        self.horizon = shape[0] if horizon is None else horizon
        self.noise_shape = (self.horizon, self._width)

    @abstractmethod
    def see(self, inputs: Inputs) -> Any:
        """Encode `inputs` once for all steps of a chain."""

    @abstractmethod
    def velocity_of(self, seen: Any, inputs: Inputs) -> Velocity:
        """Return the velocity as a function of chunks [n, H, M] and times [n]."""

    @abstractmethod
    def values_of(self, seen: Any, inputs: Inputs) -> Tensor | None:
        """Return values [n, V]; None without a value head."""

    def times(self, count: int) -> Tensor | None:
        """Draw the times, [n], at which demonstrations are trained on; None: evenly from 0 to 1."""
        return None

    def to_env(self, actions: Tensor) -> Array:
        """See `BasePolicy`: what is carried out of the samples, [n, C, A]."""
        first = actions.shape[-1] - self._width
        last = actions[:, : self.shape[0], first : first + self.shape[1]].cpu().numpy()
        return self.normalization.actions_of(last).astype(np.float32)

    def from_env(self, actions: Array) -> Tensor:
        """See `BasePolicy`: demonstrated actions are samples alone, [n, H, A]; `imitation_losses` takes them."""
        return super().from_env(self.normalization.normalized_actions(actions).astype(np.float32))

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`: greedy is the flow from 0, without noise, and so without log-probabilities."""
        seen = self.see(inputs)
        velocity = self.velocity_of(seen, inputs)
        first = next(iter(inputs.values()))
        zero = torch.zeros(len(first), self.horizon, self._width, device=first.device)
        if greedy:
            return PolicyOutput(self.sde.follow(velocity, zero), None, self.values_of(seen, inputs))
        record, logprobs = self.sde.draw(velocity, zero, generator)
        return PolicyOutput(_flat(record), self._carried_out(logprobs), self.values_of(seen, inputs))

    @torch.no_grad()
    def from_noise(self, inputs: Inputs, noise: Tensor) -> Tensor:
        """See `BasePolicy`: the end of the flow from that noise, [n, H, M]."""
        return self.sde.follow(self.velocity_of(self.see(inputs), inputs), noise)

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        record = actions.view(-1, self.horizon, self.sde.recorded, self._width).permute(2, 0, 1, 3)
        seen = self.see(inputs)
        logprobs = self._carried_out(self.sde.logprobs(self.velocity_of(seen, inputs), record))
        return ActionEval(logprobs, self._carried_out(self.sde.entropies(record)), self.values_of(seen, inputs))

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        return with_value_head(self.values_of(self.see(inputs), inputs))

    def imitation_losses(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """See `BasePolicy`: the squared errors of the velocity, [n, H, M]."""
        ends = functional.pad(actions, (0, self._width - self.shape[1]))
        velocity = self.velocity_of(self.see(inputs), inputs)
        return flow_matching_losses(velocity, ends, time=self.times(len(ends)))

    def _carried_out(self, steps: Tensor) -> Tensor:
        """Return [S, n, H, M], cut to the actions and dimensions that the environment takes, as [n, C, S * A]."""
        return _flat(steps[:, :, : self.shape[0], : self.shape[1]])


def flow_sde(options: FlowOptions | FlowVlaOptions, steps: int) -> FlowSde:
    """Return K steps with the noise that `actor.model.options` configures."""
    return (FlowSde if options.noisy_steps == "all" else OneStepSde)(steps, options.noise)


def check_horizon(executed: int, horizon: int, where: str | None = None) -> None:
    """Check that no more actions are carried out than a model predicts.

    Raises:
        ConfigError: they are.
    """
    if executed > horizon:
        raise ConfigError(
            f"the model predicts {horizon} actions, but `num_action_chunks` is {executed}",
            where=where,
            help=f"write `num_action_chunks: {horizon}` or less; or, to fine-tune it to predict more,"
            f" `options: {{action_horizon: {executed}}}`",
        )


def _flat(steps: Tensor) -> Tensor:
    """Return [R, n, H, M] as [n, H, R * M]."""
    return steps.permute(1, 2, 0, 3).flatten(2)


_FREQUENCIES = 8


class FlowPolicy(FlowMatchingPolicy):
    """Flow matching of chunks by small networks. Values are one for each action of a chunk."""

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
        """See `BasePolicy`: states normalized, images as they are."""
        if self._has_states:
            states = self.normalization.normalized_states(observations[STATES])
            observations = {**observations, STATES: states.astype(np.float32)}
        return super().prepare(observations)

    def describe_images(self) -> dict[str, Any]:
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
        """See `FlowMatchingPolicy`: features of what is seen, [n, width]."""
        return self.actor(inputs)

    def velocity_of(self, seen: Tensor, inputs: Inputs) -> Velocity:
        return partial(self._flow, seen)

    def values_of(self, seen: Tensor | None, inputs: Inputs) -> Tensor | None:
        """See `FlowMatchingPolicy`: a network of its own, one value for each action of a chunk."""
        return None if self.critic is None else self.critic(inputs)

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`; the network of actions is not needed."""
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
