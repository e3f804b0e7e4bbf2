"""Trajectories that a rollout sends to an actor: steps of some environments, and joining pieces into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.loop.protocols import OUTCOME
from recipes.embodied.models.base_policy import Inputs, PolicyOutput
from recipes.training.arrays import Array
from rlinf_core import ConfigError
from rlinf_core.config.sections.values import Level


@dataclass(frozen=True)
class RolloutChunks:
    """T chunks of B environments with consecutive numbers.

    Attributes:
        first: the number of the first environment, counted over all passes of the step.
        version: the version of the weights that acted; the oldest if they changed in between.
        inputs: the inputs of the policy, each [T, B, ...].
        steps: `actions` [T, B, ...], `logprobs` [T, B, C, D]; `rewards` float32 and `terminations`, `truncations`,
            `valid` bool [T, B, C]; with a value head `values` and `finals` [T, B, V]: the value of the observation in
            which an episode was truncated, and arbitrary elsewhere.
        last: float32 [B, V], value of the observation after the last step; None without a value head.
    """

    first: int
    version: int
    inputs: Inputs
    steps: dict[str, Tensor]
    last: Tensor | None

    @property
    def batch(self) -> int:
        """The number of environments, B."""
        return self.steps["rewards"].shape[1]

    def rows(self, start: int, stop: int, first: int) -> RolloutChunks:
        """Return some of the environments, the first of which has the number `first`."""
        if (start, stop) == (0, self.batch):
            return RolloutChunks(first, self.version, self.inputs, self.steps, self.last)
        return RolloutChunks(
            first,
            self.version,
            {name: tensor[:, start:stop].contiguous() for name, tensor in self.inputs.items()},
            {name: step[:, start:stop].contiguous() for name, step in self.steps.items()},
            None if self.last is None else self.last[start:stop].contiguous(),
        )


def joined(pieces: Sequence[RolloutChunks]) -> RolloutChunks:
    """Join pieces into one batch, ordered by environment number."""
    ordered = sorted(pieces, key=lambda piece: piece.first)
    if len(ordered) == 1:
        return ordered[0]
    lasts = [piece.last for piece in ordered if piece.last is not None]
    return RolloutChunks(
        ordered[0].first,
        min(piece.version for piece in ordered),
        {name: torch.cat([piece.inputs[name] for piece in ordered], dim=1) for name in ordered[0].inputs},
        {name: torch.cat([piece.steps[name] for piece in ordered], dim=1) for name in ordered[0].steps},
        torch.cat(lasts) if lasts else None,
    )


class RolloutBuffer:
    """Records the steps of one batch of environments as they happen.

    Arrays are copied, so that those in shared memory are released at once.

    Args:
        steps: T.
        version: the version of the weights that act.
    """

    def __init__(self, steps: int, version: int) -> None:
        self._length = steps
        self._version = version
        self._inputs: Inputs = {}
        self._steps: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    def add_action(self, step: int, inputs: Inputs, output: PolicyOutput) -> None:
        """Record the observations of a step and the actions that the policy chose.

        Raises:
            ConfigError: a tensor has another shape than in the first step.
        """
        for name, tensor in inputs.items():
            self._write(self._inputs, name, step, tensor)
        self._write(self._steps, "actions", step, output.actions)
        if output.logprobs is not None:
            self._write(self._steps, "logprobs", step, output.logprobs)
        if output.values is not None:
            self._write(self._steps, "values", step, output.values)

    def add_outcome(self, step: int, outcome: dict[str, Array], finals: Tensor | None) -> None:
        """Record the outcome; `finals` are the values of observations that ended episodes, None if none is needed."""
        for name in OUTCOME:
            self._write(self._steps, name, step, torch.from_numpy(outcome[name]))  # pyright: ignore[reportUnknownMemberType]
        if finals is not None:
            self._write(self._steps, "finals", step, finals)

    def leave_out(self, step: int, rows: NDArray[np.bool_]) -> None:
        """Mark all steps of the episodes that failed in a step as invalid.

        Args:
            step: the step, which is already invalid.
            rows: bool [B], whether the episode failed.
        """
        valid, ends = self._steps["valid"], self._steps["terminations"] | self._steps["truncations"]
        for row in np.flatnonzero(rows).tolist():
            over = torch.nonzero(ends[:step, row].any(dim=1))
            valid[int(over[-1]) + 1 if len(over) else 0 : step, row] = False

    def add_to_step(self, name: str, step: int, value: Tensor) -> None:
        """Record a further property of a step, [environments, ...]."""
        self._write(self._steps, name, step, value)

    def finish(self, last: Tensor | None) -> RolloutChunks:
        """Return all steps, after the last one; `last` as in `RolloutChunks`."""
        if last is not None and "finals" not in self._steps:
            self._steps["finals"] = torch.zeros_like(self._steps["values"])
        # Values of the last observations are on the acting device; everything sent is on the CPU.
        return RolloutChunks(0, self._version, self._inputs, self._steps, None if last is None else last.cpu())

    def _write(self, columns: dict[str, Tensor], name: str, step: int, value: Tensor) -> None:
        column = columns.get(name)
        if column is None:
            column = columns[name] = torch.zeros((self._length, *value.shape), dtype=value.dtype, device="cpu")
        if column.shape[1:] != value.shape:  # of one entry, it would be repeated
            raise ConfigError(
                f"`{name}` of step {step + 1} of a pass is {list(value.shape)}, and was {list(column.shape[1:])}",
                help="let `prepare` and `act` of your policy return the same shapes in each step, with padded prompts",
            )
        column[step].copy_(value)


def sum_to_level(values: Tensor, level: Level) -> Tensor:
    """Return log-probabilities or entropies of tokens, summed to a level.

    Args:
        values: float [..., C, D].
        level: `token_level` keeps [..., C, D], `action_level` gives [..., C], `chunk_level` gives [...].
    """
    if level == "token_level":
        return values
    return values.sum(dim=-1) if level == "action_level" else values.sum(dim=(-2, -1))


def rewards_to_level(rewards: Tensor, dones: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Convert rewards and ends of episodes per action, [T, B, C], to the steps of a level.

    Args:
        rewards: float [T, B, C].
        dones: bool [T, B, C], whether the episode ended with that action.
        level: `chunk_level` sums the rewards of a chunk, which ends when any of its actions does: [T, B].
            `action_level` makes every action its own step: [T * C, B].
    """
    if level == "chunk_level":
        return rewards.sum(dim=-1), dones.any(dim=-1)
    return flatten_chunks(rewards), flatten_chunks(dones)


def leading(mask: Tensor, dimensions: int) -> Tensor:
    """Reduce a mask to its first dimensions: a chunk counts if any of its actions does."""
    return mask if mask.dim() <= dimensions else mask.flatten(start_dim=dimensions).any(dim=-1) if dimensions else mask


def flatten_chunks(values: Tensor) -> Tensor:
    """Reshape [T, B, C] to [T * C, B]: the actions of a chunk follow each other in time."""
    steps, batch, chunk = values.shape
    return values.transpose(1, 2).reshape(steps * chunk, batch)


def fold_chunks(values: Tensor, chunk: int) -> Tensor:
    """Reshape [T * C, B] to [T, B, C], the inverse of `flatten_chunks`."""
    steps, batch = values.shape
    return values.reshape(steps // chunk, chunk, batch).transpose(1, 2)
