"""A task so simple that every number can be said in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts, State


class CountingEnv(VectorEnv):
    """The state counts the steps of an episode, beside the random number that it began with.

    The action is the reward. The task ends when the count reaches `end` of the environment (0: never), and is solved
    while the count is `solved`. Where the count reaches `broken` of the environment (0: never), the next observation,
    or with `breaks: reward` the reward, is NaN.
    """

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.count = np.zeros(self.num_envs, np.int64)
        self.draw = np.zeros(self.num_envs)
        self.end = np.array(settings.options.get("end", [0] * self.num_envs))
        self.solved_at = settings.options.get("solved", 1)
        self.broken = np.array(settings.options.get("broken", [0] * self.num_envs))
        self.breaks = settings.options.get("breaks", "observation")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=2, action_size=1)

    def _start(self, rows: IntArray, starts: Starts) -> None:
        self.count[rows] = 0
        self.draw[rows] = starts.uniform(1)[:, 0]

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        moving = np.ones(self.num_envs, np.bool_) if rows is None else np.isin(np.arange(self.num_envs), rows)
        self.count = self.count + moving
        rewards = actions[:, 0].astype(np.float32)
        return Transition(
            rewards=np.where(self._breaks("reward"), np.float32(np.nan), rewards),
            terminations=self.count == self.end,
            successes=self.count == self.solved_at,
        )

    def _save(self) -> State:
        return {"count": self.count, "draw": self.draw}

    def _load(self, state: State) -> None:
        self.count, self.draw = state["count"].copy(), state["draw"].copy()

    def _observe(self) -> Observation:
        counts = np.where(self._breaks("observation"), np.nan, self.count)
        return {"states": np.stack((counts, self.draw), axis=1).astype(np.float32)}

    def _breaks(self, what: str) -> NDArray[np.bool_]:
        return (self.count == self.broken) & (self.count > 0) & (self.breaks == what)


@pytest.fixture(scope="session")
def counting() -> Callable[..., CountingEnv]:
    def make(num_envs: int = 4, **settings: Any) -> CountingEnv:
        return CountingEnv(EnvSettings(num_envs=num_envs, **settings))

    return make
