"""Environments whose simulator steps all of them at once: pools in C++, GPU simulators.

Such a simulator cannot leave one environment out. A resting environment is stepped with the others, and its
observations are ignored; its next episode begins from its own start.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import BoolArray, EnvSettings, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts
from recipes.training.arrays import Array
from rlinf_core import ConfigError


class BatchedEnv(VectorEnv):
    """A batch of environments behind one simulator. A resumed run starts new episodes.

    Attributes:
        ends: whether the simulator requires a reset after it has ended an episode.
    """

    ends: bool = True

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        if self.ends and settings.ignore_terminations:
            raise ConfigError(
                f"environments of `{settings.task}` reset themselves, so that `ignore_terminations` cannot continue"
                " their episodes",
                where="env.ignore_terminations",
                help="remove `ignore_terminations`",
            )
        self._seen: Observation = {}
        self._seeds = np.zeros(settings.num_envs, np.int64)
        # Environments whose episode the simulator has ended and not restarted.
        self._over = np.zeros(settings.num_envs, np.bool_)

    @abstractmethod
    def _begin_rows(self, mask: BoolArray, seeds: IntArray) -> Observation:
        """Reset the environments of a mask, bool [B], and return the observations of all.

        Args:
            mask: the mask; at least one entry is true.
            seeds: int64 [B], from 0 to below 2^31; other environments keep the seed of their last start.
        """

    @abstractmethod
    def _step_all(self, actions: Array) -> tuple[Observation, Transition]:
        """Execute actions [B, A] in all environments; return the observations after them, and the results."""

    def _start(self, rows: IntArray, starts: Starts) -> None:
        self._seeds[rows] = starts.seeds()
        self._restart(self._mask(rows), shown=True)

    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        if self._over.any():
            self._restart(self._over.copy(), shown=False)
        observations, moved = self._step_all(actions)
        self._over |= moved.terminations & self.ends
        if moved.truncations is not None:
            self._over |= moved.truncations & self.ends
        self._show(observations, np.ones(self.num_envs, np.bool_) if rows is None else self._mask(rows))
        return moved

    def _observe(self) -> Observation:
        return {name: array.copy() for name, array in self._seen.items()}

    def _restart(self, mask: BoolArray, *, shown: bool) -> None:
        observations = self._begin_rows(mask, self._seeds)
        self._over &= ~mask
        if shown:
            self._show(observations, mask)

    def _show(self, observations: Observation, rows: BoolArray) -> None:
        for name, array in observations.items():
            kept = self._seen.get(name)
            if kept is None or rows.all():
                self._seen[name] = array.copy()
            elif array.dtype.kind == "U":
                self._seen[name] = np.where(rows, array, kept)
            else:
                kept[rows] = array[rows]

    def _mask(self, rows: IntArray) -> BoolArray:
        mask = np.zeros(self.num_envs, np.bool_)
        mask[rows] = True
        return mask
