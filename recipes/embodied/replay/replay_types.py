"""Inputs and outputs of replay buffers. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.training.arrays import Array
from rlinf_core import RLinfError

Rows: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Flags: TypeAlias = NDArray[np.bool_]
# Arrays [n, ...] by name.
Arrays: TypeAlias = dict[str, Array]


class ReplayError(RLinfError):
    """A replay buffer cannot be made, filled or read."""


class ColumnSpec(NamedTuple):
    """Shape and numpy type of one row of a column, such as `((64, 64, 3), "uint8")`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TransitionSpec:
    """The columns of transitions.

    Attributes:
        observations: the observations by name; images are uint8.
        actions: the shape and type of one action.
    """

    observations: Mapping[str, ColumnSpec]
    actions: ColumnSpec

    @classmethod
    def of(cls, observations: Mapping[str, tuple[tuple[int, ...], str]], action: tuple[int, str]) -> TransitionSpec:
        """Return the columns of an environment; texts are left out.

        Args:
            observations: `EnvSpec.observations`.
            action: how many numbers an action has, and their type.
        """
        kept = {name: ColumnSpec(tuple(shape), kind) for name, (shape, kind) in observations.items() if kind != "U"}
        return cls(kept, ColumnSpec((action[0],), action[1]))

    @property
    def observation_bytes(self) -> int:
        """Bytes of an observation."""
        return sum(observation.nbytes for observation in self.observations.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: an observation, an action, a reward (4) and flags (1)."""
        return self.observation_bytes + self.actions.nbytes + 5


@dataclass(frozen=True, slots=True)
class Transitions:
    """One step in each of n different environments.

    Attributes:
        observations: the observations before the step, [n, ...], by name.
        actions: [n, A].
        rewards: float32 [n].
        terminations: bool [n], the task ended: nothing comes after it.
        truncations: bool [n], the episode was cut off: the next observation has a value.
        next_observations: the observations after the step, of the same episode: never the first observation of the one
            that follows.
    """

    observations: Mapping[str, Array]
    actions: Array
    rewards: Array
    terminations: Flags
    truncations: Flags
    next_observations: Mapping[str, Array]

    def chosen(self, rows: Array) -> Transitions:
        """Return some of the rows."""
        return Transitions(
            {name: observation[rows] for name, observation in self.observations.items()},
            self.actions[rows],
            self.rewards[rows],
            self.terminations[rows],
            self.truncations[rows],
            {name: observation[rows] for name, observation in self.next_observations.items()},
        )


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """n transitions of up to k steps each, as critics learn from them.

    The target is `rewards + discounts * value(next_observations)`.

    Attributes:
        observations: [n, ...] by name.
        actions: [n, A].
        rewards: float32 [n], the sum of discounted rewards of the steps.
        discounts: float32 [n], the discount to the power of the steps; 0 where the task ended.
        next_observations: [n, ...] by name, after the last of the steps.
    """

    observations: Arrays
    actions: Array
    rewards: Floats
    discounts: Floats
    next_observations: Arrays

    def __len__(self) -> int:
        return len(self.rewards)


def joined(parts: list[ReplayBatch]) -> ReplayBatch:
    """Return several batches as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    names = parts[0].observations
    return ReplayBatch(
        {name: np.concatenate([part.observations[name] for part in parts]) for name in names},
        np.concatenate([part.actions for part in parts]),
        np.concatenate([part.rewards for part in parts]),
        np.concatenate([part.discounts for part in parts]),
        {name: np.concatenate([part.next_observations[name] for part in parts]) for name in names},
    )
