"""Greedy actions of evaluations, each by temporal ensembling the mean of what several chunks say of its step.

Zhao et al. 2023, "Learning fine-grained bimanual manipulation with low-cost hardware" (arXiv 2304.13705, algorithm 2):
the i-th oldest of the predictions of a step weighs exp(-m i), with m = 0.01 as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.learning.policy_precision import output_in_float32
from recipes.training.arrays import Array

if TYPE_CHECKING:
    from recipes.embodied.config.env_config import InferenceConfig
    from recipes.embodied.models.base_policy import BasePolicy, Inputs


class GreedyActing:
    """Greedy actions of a policy, as chunks or as means over the chunks that predict them.

    Args:
        policy: the policy.
        config: the section `env.eval.inference`.
        executed: C, `actor.model.num_action_chunks`.
    """

    def __init__(self, policy: BasePolicy, config: InferenceConfig, executed: int) -> None:
        self._policy = policy
        ensembles = config.chunking == "ensemble"
        self._ensemble = TemporalEnsemble(executed) if ensembles else None

    def act(self, inputs: Inputs, begun: NDArray[np.bool_] | None = None) -> Array:
        """Return the actions of the next steps, [n, C, A].

        Args:
            inputs: the inputs of `prepare`.
            begun: bool [n], environments whose episode has just begun; None: none but the first time.
        """
        if self._ensemble is None:
            return self._policy.to_env(output_in_float32(self._policy.act(inputs, greedy=True)).actions)
        return self._policy.to_env(self._ensemble.add(self._policy.predicted(inputs).float(), begun))


class TemporalEnsemble:
    """Weighted sums of the chunks so far, for each of the steps that they reach.

    Args:
        executed: C, actions between the beginnings of two chunks.
        coefficient: m; 0: all predictions weigh the same; above: older ones weigh more.
    """

    def __init__(self, executed: int, coefficient: float = 0.01) -> None:
        self._executed, self._coefficient = executed, coefficient
        # Of the next steps: sums of weighted actions [n, H, M], of weights, and the number of predictions, [n, H, 1].
        self._sums: Tensor | None = None
        self._weights = self._counts = torch.zeros(())

    def add(self, chunk: Tensor, begun: NDArray[np.bool_] | None = None) -> Tensor:
        """Return the next actions [n, C, M].

        Args:
            chunk: the newest chunk, [n, H, M].
            begun: bool [n], environments whose episode has just begun; None: none but the first time.
        """
        if self._sums is None:
            self._sums = torch.zeros_like(chunk)
            self._weights = self._counts = torch.zeros_like(chunk[..., :1])
        kept = torch.ones_like(chunk[:, :1, :1])
        if begun is not None:
            kept[torch.from_numpy(begun).to(chunk.device)] = 0  # pyright: ignore[reportUnknownMemberType]
        weight = torch.exp(-self._coefficient * self._counts * kept)
        self._sums = self._sums * kept + weight * chunk
        self._weights = self._weights * kept + weight
        self._counts = self._counts * kept + 1
        mean = (self._sums / self._weights)[:, : self._executed]
        self._sums, self._weights, self._counts = map(self._later, (self._sums, self._weights, self._counts))
        return mean

    def _later(self, steps: Tensor) -> Tensor:
        """Return figures of steps [n, H, ...] after C of them, with nothing of the last ones."""
        return torch.cat((steps[:, self._executed :], torch.zeros_like(steps[:, : self._executed])), dim=1)
