"""Policies whose computing takes time, as on a real arm: the delay is emulated in steps of control."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.learning.policy_precision import output_in_float32
from recipes.embodied.models.flow.flow_base import FlowMatchingPolicy
from recipes.embodied.models.flow.real_time_chunking import overlap_weights
from recipes.embodied.workers.temporal_ensembling import TemporalEnsemble
from recipes.training.arrays import Array
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config.env_config import InferenceConfig
    from recipes.embodied.models.base_policy import BasePolicy, Inputs


class DelayedInference:
    """Greedy actions of a policy, of which each chunk is carried out d steps after its observation.

    Meanwhile the arm stands still (`wait`), or goes on with the chunk before: then the policy looks again after C
    steps, d of which carry out that chunk. The first chunk of an episode is there when it begins. Without delay actions
    may be means over the chunks that predict them.

    Args:
        policy: the policy.
        config: the section `env.eval.inference`.
        executed: C, `actor.model.num_action_chunks`.

    Raises:
        ConfigError: the policy predicts too few actions, or is none by flow matching.
    """

    def __init__(self, policy: BasePolicy, config: InferenceConfig, executed: int) -> None:
        self._policy, self._config = policy, config
        self._flow: FlowMatchingPolicy | None = None
        self._before: Tensor | None = None
        self._ensemble: TemporalEnsemble | None = None
        if config.chunking == "ensemble":
            self._ensemble = TemporalEnsemble(executed, config.ensemble_coefficient)
            return
        if config.chunking == "wait":
            return
        if not isinstance(policy, FlowMatchingPolicy):
            raise ConfigError(
                f"`env.eval.inference.chunking: {config.chunking}` needs a policy by flow matching",
                help="use `flow_policy`, `pi0`, `pi05` or `smolvla`, or write `chunking: wait`",
            )
        executed, horizon = policy.shape[0], policy.horizon
        if config.delay > min(executed, horizon - executed):
            raise ConfigError(
                f"a delay of {config.delay} steps is too long for chunks of {horizon} actions, {executed} of which are"
                " carried out",
                where="env.eval.inference.delay",
                why="meanwhile the policy looks once, and the arm goes on with the rest of the chunk before",
                help=f"write at most {min(executed, horizon - executed)}, or another `num_action_chunks`",
            )
        self._flow = policy

    def act(self, inputs: Inputs, begun: NDArray[np.bool_] | None = None) -> Array:
        """Return the actions of the next steps, [n, C, A], or [n, d + C, A] where the arm waits.

        Args:
            inputs: the inputs of `prepare`.
            begun: bool [n], environments whose episode has just begun; None: none but the first time.
        """
        if self._ensemble is not None:
            chunk = self._policy.predicted(inputs).float()
            return self._policy.to_env(self._ensemble.add(chunk, begun))
        if self._flow is None:
            return self._after_waiting(inputs)
        chunk = self._next_chunk(self._flow, inputs, begun)
        executed, delay = self._flow.shape[0], self._config.delay
        carried_out = chunk[:, :executed]
        if self._before is not None:
            late = torch.cat((self._before[:, executed : executed + delay], chunk[:, delay:executed]), dim=1)
            carried_out = late if begun is None else torch.where(_beside(begun, late), carried_out, late)
        self._before = chunk
        return self._flow.to_env(carried_out)

    def _next_chunk(self, policy: FlowMatchingPolicy, inputs: Inputs, begun: NDArray[np.bool_] | None) -> Tensor:
        """Return whole chunks, [n, H, ...]."""
        if self._before is None or self._config.chunking == "switch":
            return output_in_float32(policy.act(inputs, greedy=True)).actions
        executed = policy.shape[0]
        weights = overlap_weights(policy.horizon, executed, self._config.delay).to(self._before.device)
        rows = weights.expand(len(self._before), -1)
        if begun is not None:
            rows = torch.where(_beside(begun, rows), torch.zeros_like(rows), rows)
        return policy.continued(inputs, self._before.roll(-executed, dims=1), rows, self._config.guidance)

    def _after_waiting(self, inputs: Inputs) -> Array:
        """Return actions that stand still for d steps, and then those of the policy."""
        output = output_in_float32(self._policy.act(inputs, greedy=True)).actions
        actions = self._policy.to_env(output)
        first, self._before = self._before is None, output
        delay = self._config.delay
        if first or not delay:
            return actions
        return np.concatenate((np.zeros((len(actions), delay, actions.shape[2]), actions.dtype), actions), axis=1)


def _beside(rows: NDArray[np.bool_], like: Tensor) -> Tensor:
    """Return flags [n] in a shape that is broadcast over a tensor [n, ...]."""
    return torch.from_numpy(rows).to(like.device).view(-1, *[1] * (like.dim() - 1))  # pyright: ignore[reportUnknownMemberType]
