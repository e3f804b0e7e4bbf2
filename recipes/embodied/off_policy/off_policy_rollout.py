"""Rollout workers of off-policy learning, which send the observations after each step instead of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.algorithm_config import off_policy_of
from recipes.embodied.learning.trajectory import RolloutBuffer
from recipes.embodied.loop.protocols import EXECUTED, INTERVENTIONS
from recipes.embodied.loop.routing import make_routes
from recipes.embodied.models.base_policy import Inputs, PolicyOutput
from recipes.embodied.models.squashed_policy import SquashedPolicy
from recipes.embodied.off_policy.algorithm import algorithm_of
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker

# The prefix, among the steps of `RolloutChunks`, of names of observations after a step.
NEXT = "next/"
ACTIONS = "actions"


class OffPolicyRolloutWorker(MultiStepRolloutWorker):
    """Acts as `MultiStepRolloutWorker`, and may act at random at the beginning of a run."""

    def __init__(self, config: EmbodiedConfig) -> None:
        super().__init__(config)
        self._random_steps = off_policy_of(config.algorithm).random_steps
        self._learns_drawn = algorithm_of(config.algorithm).learns_drawn_actions

    def generate(self, step: int | None = None, attempt: int = 0) -> None:
        step = self._step + 1 if step is None else step
        train = self._config.env.train
        routes = make_routes(self._layout, self._config, training=True)
        before = (step - 1) * routes.total * train.max_steps_per_rollout_epoch * train.rollout_epoch
        # Depends only on the step, so that a resumed run acts the same.
        self._random = before < self._random_steps
        super().generate(step, attempt)

    def _act(self, inputs: Inputs) -> PolicyOutput:
        if self._random and isinstance(self.policy, SquashedPolicy):
            return self.policy.random(inputs)
        return super()._act(inputs)

    def _add_outcome(self, buffer: RolloutBuffer, step: int, message: dict[str, Any], following: Inputs) -> None:
        if self._learns_drawn:
            message = {name: array for name, array in message.items() if name != EXECUTED}
        record_step(buffer, step, message, self.policy.recorded(self._following(message, following)))

    def _last_values(self, inputs: Inputs) -> None:
        return None

    def _following(self, message: dict[str, Any], inputs: Inputs) -> Inputs:
        """Return the observations after a step; where an episode ended, its final ones."""
        if "final_observations" not in message:
            # No episode was truncated, and nothing follows a terminated one.
            return inputs
        finals = self.policy.prepare(message["final_observations"])
        # An episode may have ended within a chunk, whose rest was not executed.
        ended = torch.from_numpy(message["truncations"] | message["terminations"]).any(dim=1)  # pyright: ignore[reportUnknownMemberType]
        return {name: _chosen(ended, finals[name], tensor) for name, tensor in inputs.items()}


def record_step(buffer: RolloutBuffer, step: int, outcome: dict[str, Any], following: Inputs) -> None:
    """Record the result of a step, with the following observations instead of their values.

    Executed actions, by a person or within an arm's limits, replace the policy's.

    Args:
        buffer: the buffer, which has the step's action.
        step: the number of the step.
        outcome: see `recipes.embodied.loop.protocols`.
        following: the observations after the step; where an episode ended, its final ones.
    """
    buffer.add_outcome(step, outcome, None)
    for name, column in ((EXECUTED, ACTIONS), (INTERVENTIONS, INTERVENTIONS)):
        if name in outcome:
            buffer.add_to_step(column, step, torch.from_numpy(outcome[name]))  # pyright: ignore[reportUnknownMemberType]
    for name, tensor in following.items():
        buffer.add_to_step(f"{NEXT}{name}", step, tensor)


def _chosen(rows: Tensor, theirs: Tensor, others: Tensor) -> Tensor:
    """Return rows [n, ...] of `theirs` where `rows`, bool [n], is true, else of `others`."""
    return torch.where(rows.to(others.device).reshape(-1, *(1,) * (others.dim() - 1)), theirs, others)
