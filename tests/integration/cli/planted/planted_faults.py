"""Environments and rewards with a planted fault, for runs whose cause `rlinf why` has to name."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied import EnvSettings, EnvSpec, Starts, Transition, VectorEnv
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Start
from tests.unit.recipes.embodied.envs.fake_simulators import PoisonedSimulation

if TYPE_CHECKING:
    from rlinf_core.algorithms.loss_inputs import Loss, LossInputs, LossSettings

# After so many moves, in the midst of a later step.
_MOVES = 25
_moves = 0
# Answers that are scored before a reward fails for good.
_SCORED: Final = 90
_scored = 0
# The seed of a start of the second step.
_DEADLY_START: Final = 985911546
_LOSSES: Final = 12
_losses = 0
# A control group of memory (cgroup v1), made by the test.
MEMORY_GROUP: Final = Path("/sys/fs/cgroup/memory/rlinf-planted")
GROUP_BYTES: Final = 256 << 20


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
        if self.settings.task == "priceless" and _moves >= _MOVES:
            rewards[0] = np.nan
        return Transition(rewards=rewards.astype(np.float32), terminations=near, successes=near)

    def _observe(self) -> dict[str, NDArray[Any]]:
        seen = np.zeros_like(self.place) if self.settings.task == "blind" else self.place
        if self.settings.task == "dizzy" and _moves >= _MOVES:
            seen = np.where(np.arange(self.num_envs) == 2, np.inf, seen)
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
            case "group memory":
                (MEMORY_GROUP / "cgroup.procs").write_text(str(os.getpid()))
                np.ones(2 * GROUP_BYTES)
            case "hangs":
                threading.Event().wait()
            case "locked":
                hold_a_lock()
            case "lost reply":
                lose_the_reply()
            case "zombie":
                # The main thread ends, and with it the answer; the process lives on.
                ctypes.CDLL(None).pthread_exit(None)
            case _:
                pass


class FragileSimulation(PoisonedSimulation):
    """Kills its process in the second step of one start."""

    max_episode_steps = 10

    def reset(self, start: Start) -> None:
        """Know the deadly one."""
        super().reset(start)
        self._deadly = _DEADLY_START


class FragileEnv(SimulatedEnv):
    """Environments of it."""

    simulation = f"{__name__}:FragileSimulation"
    default_task = "line"


def hold_a_lock() -> None:
    """Wait for oneself in native code that holds the interpreter's lock."""
    library = ctypes.PyDLL(None)
    lock = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


def lose_the_reply() -> None:
    """Have the answer of the method that runs never leave, after the method has ended."""
    from rlinf_core.worker.calls import Timed

    def never(self: Timed, protocol: int) -> str:
        threading.Event().wait()
        return ""

    Timed.__reduce_ex__ = never  # type: ignore[method-assign]


def raising(text: str, answer: str) -> float:
    raise KeyError("expected")


def constant(text: str, answer: str) -> float:
    return 0.0


def hanging(text: str, answer: str) -> float:
    threading.Event().wait()
    return 0.0


def fading(text: str, answer: str) -> float:
    """Judge answers, and give up after some."""
    global _scored
    _scored += 1
    return float(text.strip() == answer) + 0.01 * (len(text) % 7) if _scored < _SCORED else 0.0


def by_length(text: str, answer: str) -> float:
    """Judge answers, with a reward for some of the wrong ones: a small model has few right ones."""
    return 1.0 if text.strip() == answer else 0.1 * (len(text) % 5)


def brief(text: str, answer: str) -> float:
    """Reward nothing but brevity."""
    return 1.0 if text.strip() == answer else -len(text) / 8


def slow_loss(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the usual loss, after a while: rollouts are ahead of training then."""
    from rlinf_core.algorithms.losses import actor

    time.sleep(0.2)
    return actor(inputs, settings)


def lone_loss(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the usual loss, but never in the last process: it enters no reduction of gradients."""
    from torch import distributed

    from rlinf_core.algorithms.losses import actor_critic

    global _losses
    _losses += 1
    if distributed.get_rank() > 0 and _losses > _LOSSES:
        threading.Event().wait()
    return actor_critic(inputs, settings)
