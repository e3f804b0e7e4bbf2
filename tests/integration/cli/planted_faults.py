"""Environments and rewards with a planted fault, for runs whose cause `rlinf why` has to name."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.embodied import EnvSettings, EnvSpec, Starts, Transition, VectorEnv

# After so many moves, in the midst of a later step.
_MOVES = 25
_moves = 0


class FaultyEnv(VectorEnv):
    """A cart on a line; its task is the name of its fault."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self.place = np.zeros(self.num_envs)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=1, action_size=1)

    def _start(self, rows: NDArray[Any], starts: Starts) -> None:
        self.place[rows] = 2 * starts.uniform(1)[:, 0] - 1

    def _advance(self, actions: NDArray[Any], rows: NDArray[Any] | None) -> Transition:
        global _moves
        _moves += 1  # also of environments that were made again
        if _moves >= _MOVES:
            self._fail()
        self.place = self.place + 0.1 * np.clip(actions[:, 0], -1, 1)
        near = np.abs(self.place) < 0.1
        rewards = np.zeros(self.num_envs) if self.settings.task == "worthless" else -np.abs(self.place)
        return Transition(rewards=rewards.astype(np.float32), terminations=near, successes=near)

    def _observe(self) -> dict[str, NDArray[Any]]:
        seen = np.zeros_like(self.place) if self.settings.task == "blind" else self.place
        return {"states": seen[:, None].astype(np.float32)}

    def _fail(self) -> None:
        match self.settings.task:
            case "exit":
                os._exit(3)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "broken":
                raise KeyError("joint")
            case "memory":
                np.ones(1 << 50)
            case _:
                pass


def raising(text: str, answer: str) -> float:
    raise KeyError("expected")


def constant(text: str, answer: str) -> float:
    return 0.0
