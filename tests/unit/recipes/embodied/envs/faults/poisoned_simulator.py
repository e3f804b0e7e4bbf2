"""A simulator that one start kills, as a scene with a broken mesh does. Needs numpy only."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start


class PoisonedSimulation(Simulation):
    """Moves along a line; the start `options["seed"]` kills its process at the second step."""

    max_episode_steps = 4

    def __init__(self, task: str, options: Any) -> None:
        self._deadly = int(options.get("seed", -1))
        self._start, self._steps, self._place = Start(0, 0), 0, 0.0

    @property
    def spec(self) -> EnvSpec:
        """One number seen, one moved by."""
        return EnvSpec(state_size=1, action_size=1)

    def reset(self, start: Start) -> None:
        """Begin at a place that follows from the seed."""
        self._start, self._steps, self._place = start, 0, start.seed % 5 / 5

    def step(self, action: Any) -> Outcome:
        """Move."""
        self._steps += 1
        if self._steps == 2 and self._start.seed == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        self._place += 0.1 * float(action[0])
        return Outcome(-abs(self._place))

    def observe(self) -> Row:
        """Look."""
        return {"states": np.array([self._place], np.float32)}


class PoisonedEnv(SimulatedEnv):
    """Environments of the simulator."""

    simulation = f"{__name__}:PoisonedSimulation"
    default_task = "line"
