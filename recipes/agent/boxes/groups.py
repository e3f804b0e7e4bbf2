"""Control groups of boxes, which bound memory, processes and processor time of a whole box, if the system permits."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from recipes.language.sandbox.memory_groups import place_of_groups
from rlinf_core.node.process_end import own_group

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
