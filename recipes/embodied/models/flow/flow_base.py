"""Base of the policies by flow matching: chains of denoising steps, their log-probabilities, and learning from ends."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.flow.flow_matching import FlowSde, Velocity, flow_matching_losses


class FlowMatchingPolicy(BasePolicy):
    """Flow matching of chunks; for reinforcement learning with noise at each of K steps (`flow_matching`).

    An action that was drawn is its whole way from noise: D = (K + 1) * M numbers, of which the environment takes the
    first A of the last M. M is larger than A where a network has room for more numbers than the environment's actions
    have; the flow leads those to 0.

    Args:
        sde: the denoising steps.
        shape: C actions of a chunk, and A numbers of an action.
        width: M; None: A.
    """

    def __init__(self, sde: FlowSde, shape: tuple[int, int], width: int | None = None) -> None:
        super().__init__()
        self.sde = sde
        self.shape = shape
        self._width = shape[1] if width is None else width

    @abstractmethod
    def see(self, inputs: Inputs) -> Any:
        """Encode `inputs` once for all steps of a chain."""

    @abstractmethod
    def velocity_of(self, seen: Any, inputs: Inputs) -> Velocity:
        """Return the velocity as a function of chunks [n, C, M] and times [n]."""

    @abstractmethod
    def values_of(self, seen: Any, inputs: Inputs) -> Tensor | None:
        """Return values [n, V]; None without a value head."""

    def times(self, count: int) -> Tensor | None:
        """Draw the times, [n], at which demonstrations are learned from; None: evenly from 0 to 1."""
        return None

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        """See `BasePolicy`: the ends of the chains, [n, C, A]."""
        first = actions.shape[-1] - self._width
        last = actions[..., first : first + self.shape[1]].cpu().numpy()
        return self.normalization.actions_of(last).astype(np.float32)

    def from_env(self, actions: NDArray[Any]) -> Tensor:
        """See `BasePolicy`: demonstrated actions are ends alone, [n, C, A]; `imitation_losses` takes them."""
        return super().from_env(self.normalization.normalized_actions(actions).astype(np.float32))

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`: greedy is the flow from 0, without noise."""
        seen = self.see(inputs)
        velocity = self.velocity_of(seen, inputs)
        first = next(iter(inputs.values()))
        zero = torch.zeros(len(first), self.shape[0], self._width, device=first.device)
        chain = self.sde.follow(velocity, zero) if greedy else self.sde.draw(velocity, zero, generator)
        return PolicyOutput(_flat(chain), _flat(self.sde.logprobs(velocity, chain)), self.values_of(seen, inputs))

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`."""
        chain = actions.view(-1, self.shape[0], self.sde.steps + 1, self._width).permute(2, 0, 1, 3)
        seen = self.see(inputs)
        logprobs = self.sde.logprobs(self.velocity_of(seen, inputs), chain)
        return ActionEval(_flat(logprobs), _flat(self.sde.entropies(chain[0])), self.values_of(seen, inputs))

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`."""
        return with_value_head(self.values_of(self.see(inputs), inputs))

    def imitation_losses(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """See `BasePolicy`: the squared errors of the velocity, [n, C, M]."""
        ends = functional.pad(actions, (0, self._width - self.shape[1]))
        velocity = self.velocity_of(self.see(inputs), inputs)
        return flow_matching_losses(velocity, ends, time=self.times(len(ends)))


def with_value_head(values: Tensor | None) -> Tensor:
    """Return values that are there.

    Raises:
        ValueError: the policy has no value head.
    """
    if values is None:
        raise ValueError("the model has no value head: `actor.model.add_value_head` is false")
    return values


def _flat(chain: Tensor) -> Tensor:
    """Return [K + 1, n, C, M] as [n, C, (K + 1) * M]."""
    return chain.permute(1, 2, 0, 3).flatten(2)
