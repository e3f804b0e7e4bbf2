"""Limits of boxes: control groups, which bound a whole box where the system permits, and the memory of all boxes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from recipes.language.sandbox.program_limits import place_of_groups
from rlinf_core import ConfigError
from rlinf_core.collective.memory_budget import allowed_bytes
from rlinf_core.node.process_life import own_group

PREFIX: Final = "rlinf-box-"
_PERIOD: Final = 100_000


def group_place() -> Path | None:
    """Return where this process may create groups that bound memory; None: nowhere.

    Version 2 must be delegated, as systemd does; with version 1, the user must be able to write in their own group.
    """
    own = own_group()
    place = place_of_groups(own.path if own is not None else None)
    if place is not None or own is None:
        return place
    first = Path(own.path)
    return first if (first / "memory.limit_in_bytes").exists() and os.access(first, os.W_OK) else None


class BoxGroup:
    """The control group of one box.

    Args:
        place: the folder for the group.
        name: the name of the group, which begins with `rlinf-box-`.
        memory: the memory limit in bytes.
        processes: the maximum number of processes.
        cpus: the number of processors; 0: all.

    Raises:
        OSError: the group cannot be created.
    """

    def __init__(self, place: Path, name: str, memory: int, processes: int, cpus: float) -> None:
        self._folder = place / name
        self._folder.mkdir()
        try:
            if (self._folder / "memory.limit_in_bytes").exists():
                self._write("memory.limit_in_bytes", memory)
                self._write("memory.memsw.limit_in_bytes", memory, needed=False)
            else:
                self._write("memory.max", memory)
                self._write("memory.swap.max", 0, needed=False)
                self._write("pids.max", processes, needed=False)
                if cpus:
                    self._write("cpu.max", f"{int(cpus * _PERIOD)} {_PERIOD}", needed=False)
            self.entrance = os.open(self._folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self._folder.rmdir()
            raise

    def _write(self, name: str, value: object, *, needed: bool = True) -> None:
        if needed or (self._folder / name).exists():
            (self._folder / name).write_text(str(value), encoding="ascii")

    @property
    def peak(self) -> int:
        """The peak memory in bytes; 0 if unknown."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with contextlib.suppress(OSError, ValueError):
                return int((self._folder / name).read_text(encoding="ascii"))
        return 0

    def remove(self) -> None:
        """Remove the group; if its processes are still ending, leave it to the sweep."""
        with contextlib.suppress(OSError):
            os.close(self.entrance)
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def remove_left_over(place: Path, alive: set[str], birth_seconds: float) -> None:
    """Remove the groups of boxes that no longer exist; the kernel keeps groups with processes.

    Args:
        alive: the names of existing boxes.
        birth_seconds: the minimum age; a younger group may belong to a box that has no folder yet.
    """
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.name not in alive and time.time() - folder.stat().st_mtime > birth_seconds:
                folder.rmdir()


# The lock of the one process that waits for memory, so that small boxes cannot overtake large ones forever.
_GATE: Final = 1 << 40
_POLL_SECONDS: Final = 0.01
# Type, whence, start, length, process id: `struct flock` of 64-bit Linux.
_LOCK: Final = struct.Struct("hhxxxxqqixxxx")


def half_of_memory() -> int:
    """Return half of the node's memory, or of the container's limit, in MiB."""
    return allowed_bytes() >> 21


class BoxMemory:
    """The memory of a node's boxes, so that all of them fit into it.

    A file has a byte for each MiB, and a box locks as many bytes as it needs. The kernel releases locks whenever their
    process ends, so there is no server, and nothing to clean up.

    Args:
        path: the file, which all processes of the node share.
        memory: the MiB for all boxes together.

    Attributes:
        waiting: the number of tasks of this process that wait for memory.
    """

    def __init__(self, path: Path, memory: int) -> None:
        self._path, self.memory = path, memory
        self.waiting = 0
        # The queue of this process: first come, first served.
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def admit(self, mib: int) -> AsyncGenerator[None]:
        """Wait until there is memory for a box, and reserve it within the block.

        Raises:
            ConfigError: the box needs more than the node has for all boxes.
        """
        if mib > self.memory:
            raise ConfigError(
                f"a box needs {mib} MiB, and all boxes of a node may have {self.memory} MiB",
                help="raise `agent.environment.options.box_memory_mib` (`--memory` of `rlinf tasks`), or lower"
                " `memory_mb` in the task's task.toml",
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
        """Return the MiB that no box has reserved."""
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
        # This process holds the gate, so nobody else can lock these ranges in between.
        return all(_take(descriptor, start, length) for start, length in ranges)


def _free(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that nobody else has locked, ascending."""
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
