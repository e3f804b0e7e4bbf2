"""Admission of boxes by memory: those of all processes of a node together never need more than it has for boxes.

A file has a byte for each MiB, and a box holds locks on as many as it needs. The kernel gives them back however the
process ends that holds them: there is no server, and nothing to clean up.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rlinf_core import ConfigError
from rlinf_core.collective.memory_budget import allowed_bytes

# Of one process at a time, which waits for memory: large boxes are not overtaken for ever by small ones.
_GATE: Final = 1 << 40
_POLL_SECONDS: Final = 0.01
# Type, whence, start, length, process id: `struct flock` of 64-bit Linux.
_LOCK: Final = struct.Struct("hhxxxxqqixxxx")


def half_of_memory() -> int:
    """Return half of the memory that processes of this node may have, in MiB; in a container, of its limit."""
    return allowed_bytes() >> 21


class BoxMemory:
    """The memory of a node's boxes.

    Args:
        path: the file, of all processes of the node.
        memory: MiB for all boxes together.

    Attributes:
        waiting: tasks of this process that wait for memory.
    """

    def __init__(self, path: Path, memory: int) -> None:
        self._path, self.memory = path, memory
        self.waiting = 0
        # First come, first served, within this process.
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def admit(self, mib: int) -> AsyncGenerator[None]:
        """Wait until there is memory for a box, and hold it meanwhile.

        Raises:
            ConfigError: it needs more than the node has for all boxes.
        """
        if mib > self.memory:
            raise ConfigError(
                f"a box needs {mib} MiB, and all boxes of a node may have {self.memory} MiB",
                help="raise `agent.environment.box_memory_mib` (`--memory` of `rlinf tasks`), or lower `memory_mb` in"
                " the task's task.toml",
            )
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.waiting += 1
            try:
                async with self._turn:
                    while not _take(descriptor, _GATE, 1):
                        await asyncio.sleep(_POLL_SECONDS)
                    while not self._taken(descriptor, mib):
                        await asyncio.sleep(_POLL_SECONDS)
                    _give_back(descriptor, _GATE, 1)
            finally:
                self.waiting -= 1
            yield
        finally:
            os.close(descriptor)

    def free(self) -> int:
        """Return the MiB that no box holds."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return sum(end - start for start, end in _free(descriptor, 0, self.memory))
        finally:
            os.close(descriptor)

    def _taken(self, descriptor: int, mib: int) -> bool:
        ranges: list[tuple[int, int]] = []
        for start, end in _free(descriptor, 0, self.memory):
            ranges.append((start, min(end - start, mib - sum(length for _, length in ranges))))
            if sum(length for _, length in ranges) == mib:
                break
        else:
            return False
        # Whoever takes some has the gate: nobody comes between.
        return all(_take(descriptor, start, length) for start, length in ranges)


def _free(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that are locked by nobody else, ascending."""
    pending = [(start, end)]
    while pending:
        start, end = pending.pop()
        if start >= end:
            continue
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        kind, _, first, length, _ = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            yield start, end
        else:
            pending += [(first + length, end), (start, first)]


def _take(descriptor: int, start: int, length: int) -> bool:
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
        return True
    return False


def _give_back(descriptor: int, start: int, length: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))
