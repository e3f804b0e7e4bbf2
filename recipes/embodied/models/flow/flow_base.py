"""The base of policies by flow matching: chains of denoising steps, their log-probabilities, and imitation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recipes.embodied.config.model_config import FlowOptions, FlowVlaOptions
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.flow.flow_matching import FlowSde, OneStepSde, Velocity, flow_matching_losses
from recipes.embodied.models.heads import with_value_head
from recipes.training.arrays import Array
from rlinf_core import ConfigError


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
