"""An environment and a policy that sleep as large ones compute."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np
from stand_in_devices import work

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSpec, Transition
from recipes.embodied.models.feature_policy import MlpPolicy


class StandInEnv(VectorEnv):
    """Environments without an end."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._states = np.zeros((self.num_envs, 8), np.float32)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=8, action_size=4)

    def _start(self, rows: Any, starts: Any) -> None:
        self._states[rows] = 0.0

    def _advance(self, actions: Any, rows: Any) -> Transition:
        work("env", self.num_envs)
        self._states[:, :4] = 0.9 * self._states[:, :4] + 0.1 * actions
        none = np.zeros(self.num_envs, bool)
        return Transition(-np.square(self._states[:, 0]).astype(np.float32), none, None, none)

    def _observe(self) -> Any:
        return {"states": self._states.copy()}


class StandInPolicy(MlpPolicy):
    """A small policy that is slow."""

    def act(self, inputs: Any, **options: Any) -> Any:
        work("policy", len(inputs["states"]))
        return super().act(inputs, **options)

    def values(self, inputs: Any) -> Any:
        work("policy", len(inputs["states"]))
        return super().values(inputs)

    def forward(self, inputs: Any, actions: Any) -> Any:
        work("train", len(inputs["states"]))
        return super().forward(inputs, actions)


def reward(text: str) -> float:
    """Score an answer slowly, and by its text alone."""
    time.sleep(0.005)
    return float(zlib.crc32(text.encode()) % 2)
