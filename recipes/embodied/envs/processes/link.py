"""The link between an env worker and a simulator process: commands and answers as lines of JSON over a private pair of
pipes, and memory that both share, with actions, results and observations.

A step of a fast simulator takes less time than JSON does. Since most messages equal the previous one, each end caches
the last message of either direction, as text and as an object: never modify a sent or received object.
"""

from __future__ import annotations

import json
import mmap
import select
from collections.abc import Mapping
from io import FileIO
from typing import Any, Final

import numpy as np

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import INSTRUCTIONS
from recipes.embodied.envs.processes.simulator import Outcomes
from recipes.training.arrays import Array

# Messages are short; longer ones come in several pieces.
_PIECE_BYTES: Final = 1 << 12
# The head of the memory holds the pulses of all processes; arrays follow.
HEAD_BYTES: Final = 4096
_PULSE_WORDS: Final = 3
MAX_PROCESSES: Final = HEAD_BYTES // (_PULSE_WORDS * 8)
_ALIGNED: Final = 64
# The operations of a process; its pulse holds their index.
OPERATIONS: Final = ("starting", "making", "resetting", "stepping", "observing", "waiting")
_NUMBERS: Final = {operation: number for number, operation in enumerate(OPERATIONS)}


class JsonPipe:
    """One end of the connection.

    Args:
        reading: descriptor of the pipe that messages come from.
        writing: descriptor of the other pipe. Pipes are faster than sockets.
        seconds: the time limit of `receive`; None: no limit.
    """

    def __init__(self, reading: int, writing: int, seconds: float | None = None) -> None:
        self._reading, self._writing = FileIO(reading), FileIO(writing, "w")
        self._received = b""
        self._sent: tuple[Any, bytes] = (None, b"null\n")
        self._last: tuple[bytes, Any] = (b"null", None)
        self._poll = select.poll()
        self._poll.register(reading, select.POLLIN)
        self._milliseconds = None if seconds is None else max(1, round(seconds * 1000))

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        if message is not self._sent[0]:
            self._sent = message, json.dumps(message).encode() + b"\n"
        left = self._sent[1]
        while left:
            left = left[self._writing.write(left) :]

    def receive(self) -> Any:
        """Return the next message; None if none arrives in time.

        Raises:
            EOFError: the other end is closed.
        """
        while b"\n" not in self._received:
            if self._milliseconds is not None and not self._poll.poll(self._milliseconds):
                return None
            part = self._reading.read(_PIECE_BYTES)
            if not part:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        if line != self._last[0]:
            self._last = line, json.loads(line)
        return self._last[1]

    def close(self) -> None:
        """Close this end."""
        self._reading.close()
        self._writing.close()


class Pulse:
    """Heartbeat of one simulator process: int64 [3], a counter, an environment, and the current operation.

    Args:
        memory: the memory of the worker.
        process: the number of the process.

    Attributes:
        first_row: the first row of the environments of the process, in the batch.
    """

    def __init__(self, memory: mmap.mmap, process: int) -> None:
        first = process * _PULSE_WORDS
        # No array: this is written before every operation, and assignment to an array costs more.
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
    """Return shape and type of every array, by name; observations keep their offsets when chunks grow."""
    table: dict[str, tuple[tuple[int, ...], Any]] = {
        f"seen {name}": ((count, *shape), np.dtype(kind))
        for name, (shape, kind) in spec.observations.items()
        if name != INSTRUCTIONS  # answers carry the texts
    }
    return table | {
        "rewards": ((chunk, count), np.float32),
        "flags": ((chunk, 5, count), np.bool_),
        "actions": ((chunk, count, spec.action_size), np.dtype(spec.action_dtype)),
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
        chunk: the capacity in actions per environment, C.

    Attributes:
        actions: [C, B, A].
        outcomes: the results of each action, as writable views.
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
        """Return the results of some environments for each action, as writable views."""
        return [
            Outcomes(rewards[rows], *flags[:, rows]) for rewards, flags in zip(self._rewards, self._flags, strict=True)
        ]

    def clear_outcomes(self) -> None:
        """Set the results of all environments to 0, before a step of some of them."""
        self._rewards[:] = 0
        self._flags[:] = False
