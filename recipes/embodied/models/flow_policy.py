"""Policies by flow matching, with noise at each step, which provides log-probabilities for reinforcement learning.

A flow carries noise x_0, drawn from a standard normal distribution, to a sample x_1 along x_t = (1 - t) x_0 + t x_1; a
network estimates the velocity v = x_1 - x_0 (Lipman et al., arXiv 2210.02747). Its ordinary differential equation gives
no log-probabilities of samples. A stochastic one with the same marginals at every t does,

    dx = (v + s^2 / 2 * score) dt + s dw,    score = -(x - t v) / (1 - t)

(Song et al., arXiv 2011.13456; for reinforcement learning Flow-GRPO, arXiv 2505.05470): each Euler step draws from a
normal distribution. Here s = noise * sqrt(1 - t), so that s^2 score is bounded.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import FlowOptions, FlowVlaOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import STATES
from recipes.embodied.models.base_policy import (
    ActionEval,
    BasePolicy,
    Inputs,
    OrthogonalLinear,
    PolicyOutput,
    hidden_layers,
    with_value_head,
)
from recipes.embodied.models.feature_policy import SCALED_IMAGES, ImageEncoder
from recipes.training.arrays import Array
from rlinf_core import ConfigError

# The velocity at x [n, ...] and at the time t of each sample, [n].
Velocity = Callable[[Tensor, Tensor], Tensor]
_LOG_SQRT_TAU = math.log(2 * math.pi) / 2


class FlowSde:
    """The Euler steps of a stochastic flow, with noise at every step.

    A draw is recorded as [R, n, ...] with the sample last: here R = K + 1, the chain of all steps from the initial
    noise. Log-probabilities are those of S steps, here all K. The initial noise does not depend on the weights, and has
    none.

    Args:
        steps: K, the number of steps from noise to sample.
        noise: the scale of the noise at each step.
    """

    def __init__(self, steps: int, noise: float) -> None:
        self.steps = steps
        self.noise = noise

    @property
    def recorded(self) -> int:
        """R, the length of a record."""
        return self.steps + 1

    @property
    def judged(self) -> int:
        """S, how often the velocity is computed to evaluate a sample."""
        return self.steps

    def draw(self, velocity: Velocity, like: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw samples in the shape of `like`, [n, ...].

        Returns:
            The record, [R, n, ...], and the log-probability of each number of each step, [S, n, ...].
        """
        x = torch.empty_like(like).normal_(generator=generator)
        chain, logprobs = [x], list[Tensor]()
        for index in range(self.steps):
            at = _steps(x, index)
            drawn = torch.empty_like(x).normal_(generator=generator)
            mean, deviation = self._step(x, velocity(x, at / self.steps), at)
            x = mean + deviation * drawn
            chain.append(x)
            logprobs.append(_logprob(drawn, deviation))
        return torch.stack(chain), torch.stack(logprobs)

    def follow(self, velocity: Velocity, start: Tensor) -> Tensor:
        """Return the ends [n, ...] of the flow without noise."""
        x = start
        for index in range(self.steps):
            x = x + velocity(x, _steps(x, index) / self.steps) / self.steps
        return x

    def logprobs(self, velocity: Velocity, record: Tensor) -> Tensor:
        """Return the log-probability of each number of each step of a record, [S, n, ...]."""
        return torch.stack(
            [
                self._judge(velocity, record[index], record[index + 1], _steps(record[0], index))
                for index in range(self.steps)
            ]
        )

    def entropies(self, record: Tensor) -> Tensor:
        """Return the entropies of the distributions of each number, [S, n, ...], which are constants."""
        return torch.stack([self._entropy(record[0], _steps(record[0], index)) for index in range(self.steps)])

    def _judge(self, velocity: Velocity, x: Tensor, after: Tensor, at: Tensor) -> Tensor:
        mean, deviation = self._step(x, velocity(x, at / self.steps), at)
        return _logprob((after - mean) / deviation, deviation)

    def _entropy(self, like: Tensor, at: Tensor) -> Tensor:
        return (0.5 + _LOG_SQRT_TAU + self._deviation(at, like).log()).expand_as(like)

    def _step(self, x: Tensor, velocity: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of x after step number `at`, [n]."""
        time = _beside(at / self.steps, x)
        drift = velocity - self.noise**2 / 2 * (x - time * velocity)
        return x + drift / self.steps, self._deviation(at, x)

    def _deviation(self, at: Tensor, like: Tensor) -> Tensor:
        return _beside(self.noise * ((1 - at / self.steps) / self.steps).sqrt(), like)


class OneStepSde(FlowSde):
    """The steps of a flow with noise at one step, drawn anew for each sample (pi_RL, arXiv 2510.25889).

    One velocity evaluates a sample, whatever K is. The record holds x before that step, x after it, the step's number,
    and the sample: R = 4, S = 1.
    """

    @property
    def recorded(self) -> int:
        return 4

    @property
    def judged(self) -> int:
        return 1

    def draw(self, velocity: Velocity, like: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        x = torch.empty_like(like).normal_(generator=generator)
        drawn = torch.empty_like(x).normal_(generator=generator)
        # The generator may be on another device than integers are drawn on.
        chosen = torch.empty_like(x[:, :1].flatten(1)[:, 0]).uniform_(generator=generator).mul(self.steps).floor()
        chosen = chosen.clamp(max=self.steps - 1)
        before, after, logprobs = x, x, x
        for index in range(self.steps):
            at = _steps(x, index)
            moving = velocity(x, at / self.steps)
            mean, deviation = self._step(x, moving, at)
            noisy = _beside(chosen == index, x)
            following = torch.where(noisy, mean + deviation * drawn, x + moving / self.steps)
            before, after = torch.where(noisy, x, before), torch.where(noisy, following, after)
            logprobs = torch.where(noisy, _logprob(drawn, deviation), logprobs)
            x = following
        return torch.stack((before, after, _beside(chosen, x).expand_as(x), x)), logprobs[None]

    def logprobs(self, velocity: Velocity, record: Tensor) -> Tensor:
        return self._judge(velocity, record[0], record[1], _chosen(record))[None]

    def entropies(self, record: Tensor) -> Tensor:
        return self._entropy(record[0], _chosen(record))[None]


def flow_matching_losses(
    velocity: Velocity, samples: Tensor, generator: torch.Generator | None = None, time: Tensor | None = None
) -> Tensor:
    """Return the squared errors of the velocity toward samples, [n, ...].

    Args:
        velocity: the network that learns.
        samples: the target samples.
        generator: source of randomness; None: torch's own.
        time: the time of each sample, [n]; None: drawn uniformly from 0 to 1.
    """
    noise = torch.empty_like(samples).normal_(generator=generator)
    if time is None:
        time = torch.empty(len(samples), dtype=samples.dtype, device=samples.device).uniform_(generator=generator)
    at = _beside(time, samples)
    return (velocity((1 - at) * noise + at * samples, time) - (samples - noise)).square()


def _steps(like: Tensor, index: int) -> Tensor:
    """Return a step number for each of the samples [n, ...], [n]."""
    # A traced policy takes batches of any size; `len` would fix the example's.
    return like.new_full((like.shape[0],), index)


def _chosen(record: Tensor) -> Tensor:
    """Return the number of the noisy step, [n], in a record of `OneStepSde`."""
    return record[2].flatten(1)[:, 0]


def _beside(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape numbers [n] to broadcast over samples [n, ...]."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


def _logprob(standard: Tensor, deviation: Tensor) -> Tensor:
    """Return the log-probability of a value that is `standard` standard deviations from the mean."""
    return -standard.square() / 2 - _LOG_SQRT_TAU - deviation.log()


class FlowMatchingPolicy(BasePolicy):
    """Flow matching of chunks, with noise at denoising steps for reinforcement learning (`flow_matching`).

    The network turns noise into H actions of M numbers. The environment takes the first C actions, and the first A
    numbers of each: a network may predict further ahead than is executed, and pad actions to more numbers. The flow
    turns the padding into 0.

    A drawn action is the record of `FlowSde`, [n, H, R * M], with the action itself last. Its log-probabilities are
    those of the executed part at S steps, [n, C, S * A]; they ignore the effect of noise in the other numbers on later
    steps.

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
        """Draw the times, [n], at which demonstrations are trained on; None: uniformly from 0 to 1."""
        return None

    def to_env(self, actions: Tensor) -> Array:
        """See `BasePolicy`: the executed part of the samples, [n, C, A]."""
        first = actions.shape[-1] - self._width
        last = actions[:, : self.shape[0], first : first + self.shape[1]].cpu().numpy()
        return self.normalization.actions_of(last).astype(np.float32)

    def from_env(self, actions: Array) -> Tensor:
        """See `BasePolicy`: demonstrated actions are plain samples, [n, H, A], as `imitation_losses` takes them."""
        return super().from_env(self.normalization.normalized_actions(actions).astype(np.float32))

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`: greedy actions are the flow from 0 without noise, and have no log-probabilities."""
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
        """See `BasePolicy`: the end of the flow from the noise, [n, H, M]."""
        return self.sde.follow(self.velocity_of(self.see(inputs), inputs), noise)

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`."""
        record = actions.view(-1, self.horizon, self.sde.recorded, self._width).permute(2, 0, 1, 3)
        seen = self.see(inputs)
        logprobs = self._carried_out(self.sde.logprobs(self.velocity_of(seen, inputs), record))
        return ActionEval(logprobs, self._carried_out(self.sde.entropies(record)), self.values_of(seen, inputs))

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`."""
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
    """Check that no more actions are executed than a model predicts.

    Raises:
        ConfigError: more actions are executed.
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
