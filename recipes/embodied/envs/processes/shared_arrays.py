"""Memory shared by an env worker and its simulator processes: actions in, results and observations out."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import INSTRUCTIONS
from recipes.embodied.envs.processes.simulator import Outcomes
from recipes.training.arrays import Array

# The head of the memory has room for so many processes; arrays follow it.
HEAD_BYTES: Final = 4096
_PULSE_WORDS: Final = 3
MAX_PROCESSES: Final = HEAD_BYTES // (_PULSE_WORDS * 8)
_ALIGNED: Final = 64
# What a process does, by its number in the pulse.
OPERATIONS: Final = ("starting", "making", "resetting", "stepping", "observing", "waiting")
_NUMBERS: Final = {operation: number for number, operation in enumerate(OPERATIONS)}


class Pulse:
    """Heartbeat of one simulator process: int64 [3], a counter, an environment, and the current operation.

    Args:
        memory: the memory of the worker.
        process: its number.

    Attributes:
        first_row: the first row of the environments of the process, in the batch.
    """

    def __init__(self, memory: mmap.mmap, process: int) -> None:
        first = process * _PULSE_WORDS
        # No array: it is written before every operation, and assignment to an array costs more.
        self._words = memoryview(memory)[: HEAD_BYTES // 8 * 8].cast("q")[first : first + _PULSE_WORDS]
        self.first_row = 0

    def beat(self, row: int, operation: str) -> None:
        """Record that an operation on one of the process's environments starts."""
        words = self._words
        words[1] = self.first_row + row
        words[2] = _NUMBERS[operation]
        words[0] += 1

    def read(self) -> tuple[int, int, str]:
        """Return the counter, the environment, and the operation."""
        count, row, operation = self._words
        return count, row, OPERATIONS[operation]


def _table(spec: EnvSpec, count: int, chunk: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and type of every array, by name; observations keep their place when chunks grow."""
    action = np.float32 if spec.num_choices is None else np.int64
    table: dict[str, tuple[tuple[int, ...], Any]] = {
        f"seen {name}": ((count, *shape), np.dtype(kind))
        for name, (shape, kind) in spec.observations.items()
        if name != INSTRUCTIONS  # texts come with the answers
    }
    return table | {
        "rewards": ((chunk, count), np.float32),
        "flags": ((chunk, 5, count), np.bool_),
        "actions": ((chunk, count, spec.action_size), action),
    }


def _bytes(shape: tuple[int, ...], kind: Any) -> int:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return -(-size // _ALIGNED) * _ALIGNED


def memory_bytes(spec: EnvSpec, count: int, chunk: int) -> int:
    """Return the size of the memory for `count` environments and `chunk` actions of each."""
    return HEAD_BYTES + sum(_bytes(*entry) for entry in _table(spec, count, chunk).values())


class SharedArrays:
    """The arrays of a batch in shared memory.

    Args:
        memory: a segment of `memory_bytes`.
        spec: the spec of the environments.
        count: the number of them, B.
        chunk: actions of each that there is room for, C.

    Attributes:
        actions: [C, B, A].
        outcomes: results of each action, where they are written.
        observations: the observations by name, without texts.
    """

    def __init__(self, memory: mmap.mmap, spec: EnvSpec, count: int, chunk: int) -> None:
        arrays: dict[str, Array] = {}
        offset = HEAD_BYTES
        for name, (shape, kind) in _table(spec, count, chunk).items():
            arrays[name] = np.frombuffer(memory, kind, int(np.prod(shape)), offset).reshape(shape)
            offset += _bytes(shape, kind)
        self._rewards, self._flags = arrays["rewards"], arrays["flags"]
        self.actions = arrays["actions"]
        self.outcomes = self.outcomes_of(slice(count))
        self.observations: Mapping[str, Array] = {
            name.removeprefix("seen "): array for name, array in arrays.items() if name.startswith("seen ")
        }

    def outcomes_of(self, rows: slice) -> list[Outcomes]:
        """Return the results of some environments for each action, where they are written."""
        return [
            Outcomes(rewards[rows], *flags[:, rows]) for rewards, flags in zip(self._rewards, self._flags, strict=True)
        ]

    def clear_outcomes(self) -> None:
        """Set the results of all environments to 0, before a step of some of them."""
        self._rewards[:] = 0
        self._flags[:] = False
