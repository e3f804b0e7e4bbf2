"""Simulators that behave, and such as do not, for tests of simulator processes."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from rlinf_core import ConfigError

HERE = __name__


class Options(BaseModel):
    """When the simulator of an episode misbehaves, and how."""

    model_config = ConfigDict(extra="forbid")

    breaks: str = ""
    at: str = "step"
    after: int = 2


class FakeSimulation(Simulation):
    """Counts, looks and speaks; what it shows is a function of its start and its actions."""

    made: ClassVar[int] = 0
    options_model = Options
    max_episode_steps = 5
    stored_starts = 4

    @classmethod
    def tasks(cls, task: str, options: Any) -> list[str]:
        """`many` is a set of three."""
        return ["one", "two", "three"] if task == "many" else [task]

    def __init__(self, task: str, options: Options) -> None:
        if task == "unknown":
            raise ConfigError("there is no task `unknown`", where="env.task", help="known: `one`")
        self.task, self.options, self.count, self.place = task, options, 0, 0.0
        # Which of those that were made in this process.
        self.number, FakeSimulation.made = FakeSimulation.made, FakeSimulation.made + 1
        self.start = Start(0, 0)
        self._maybe_break("make")

    @property
    def spec(self) -> EnvSpec:
        """Everything that there can be."""
        return EnvSpec(3, 2, cameras={"main": (4, 6, 3), "wrist": (2, 2, 3)}, has_instructions=True)

    def reset(self, start: Start) -> None:
        """Begin at a place that follows from the seed."""
        self.start, self.count, self.place = start, 0, start.seed % 7
        self._maybe_break("reset")

    def step(self, action: Any) -> Outcome:
        """Move by the first number of the action."""
        self.count += 1
        self.place += float(action[0]) + (self.options.breaks == "drift" and self.number > 0)
        self._maybe_break("step")
        return Outcome(self.place, terminated=self.place > 8, success=self.place > 8)

    def faults_of_start(self) -> list[str]:
        """The cup of the task `two` has fallen in its odd starts, and with `breaks: fallen` in all."""
        fallen = self.options.breaks == "fallen" or (self.task == "two" and self.start.number % 2)
        return ["`cup on plate` does not hold"] if fallen else []

    def expert(self) -> Any:
        """Go on; only the task `one` has an expert."""
        return np.array([self.count, -1.0]) if self.task == "one" else None

    def observe(self) -> Row:
        """Look."""
        self._maybe_break("observe")
        return {
            "states": np.array([self.place, self.count, self.start.number], np.float32),
            "images.main": np.full((4, 6, 3), self.count, np.uint8),
            "images.wrist": np.full((2, 2, 3), int(abs(self.place)) % 256, np.uint8),
            "instructions": f"go to {self.task}",
        }

    def _maybe_break(self, operation: str) -> None:
        if self.options.breaks == "odd-start" and operation == "reset" and self.start.seed % 2:
            raise ValueError("no place to begin at")
        if operation != self.options.at or (operation != "make" and self.count < self.options.after):
            return
        if self.options.breaks == "segfault":
            print("the mesh has 0 faces")
            ctypes.string_at(0)
        elif self.options.breaks == "exit":
            raise SystemExit(3)
        elif self.options.breaks == "raise" or (self.options.breaks in ("raise-first", "drift") and self.number == 0):
            raise ValueError("the mesh has 0 faces")
        elif self.options.breaks == "dark":
            raise ImportError("Cannot initialize a EGL device display.")
        elif self.options.breaks == "sleep":
            time.sleep(3600)
        elif self.options.breaks == "hold":
            # Never gives the interpreter's lock back.
            ctypes.PyDLL(None).sleep(3600)


class FakeEnv(SimulatedEnv):
    """An environment of such simulators."""

    simulation = f"{HERE}:FakeSimulation"
    default_task = "one"


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
