"""The observations before the present one, for policies that act by several in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from recipes.embodied.envs.env_spec import IntArray, Observation
from recipes.embodied.envs.env_state import State
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, past_key

Observe: TypeAlias = Callable[[], Observation]
_SAVED: Final = "history/"


class ObservationHistory:
    """The last T - 1 observations of each environment, one a step; the first one of an episode stands for those before.

    Args:
        length: T, with the present one.

    Attributes:
        keeps: whether there is a history at all, T > 1.
    """

    def __init__(self, length: int) -> None:
        self.keeps = length > 1
        self._length = length - 1
        # Oldest first, [B, T - 1, ...].
        self._past: Observation = {}
        self._present: Observation = {}

    def begin(self, rows: IntArray, observe: Observe) -> None:
        """Start new episodes in some environments.

        Args:
            rows: int64 [n], these environments.
            observe: function that returns the present observations of all environments.
        """
        if not self.keeps:
            return
        self._present = _numbers(observe())
        for name, array in self._present.items():
            if name not in self._past:
                self._past[name] = np.repeat(array[:, None], self._length, axis=1)
            self._past[name][rows] = array[rows, None]

    def move(self, rows: IntArray | None, observe: Observe) -> None:
        """Record a step.

        Args:
            rows: int64 [n], environments that were stepped; None: all.
            observe: see `begin`.
        """
        if not self.keeps:
            return
        moved = slice(None) if rows is None else rows
        for name, array in self._present.items():
            past = self._past[name][moved]
            self._past[name][moved] = np.concatenate((past[:, 1:], array[moved, None]), axis=1)
        self._present = _numbers(observe())

    def extended(self, observations: Observation) -> Observation:
        """Return observations [B, ...] with those before them, `past.NAME` [B, T - 1, ...], oldest first."""
        if not self.keeps:
            return observations
        return observations | {past_key(name): array.copy() for name, array in self._past.items()}

    def save(self) -> State:
        """Return the history as arrays [B, ...] by name."""
        return {f"{_SAVED}{name}": array for name, array in self._past.items()}

    def load(self, state: State, observations: Observation) -> None:
        """Continue with a history of `save`, and the present observations."""
        if not self.keeps:
            return
        self._present = _numbers(observations)
        saved = {name.removeprefix(_SAVED): array for name, array in state.items() if name.startswith(_SAVED)}
        self._past = {name: array.copy() for name, array in saved.items()}


def _numbers(observations: Observation) -> Observation:
    """Return all observations but the instruction, which is the same for the whole episode."""
    return {name: array for name, array in observations.items() if name != INSTRUCTIONS}
