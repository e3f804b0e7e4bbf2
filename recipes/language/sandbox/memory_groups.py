"""Control groups that bound the memory of a whole program: all its processes, and kernel memory such as socket buffers,
which no limit of a process counts.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from rlinf_core.node.process_end import own_group

_NAME: Final = "rlinf-program-"


class MemoryGroups:
    """The control groups for programs of this process, reused when a program has ended.

    Args:
        place: the folder for the groups.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        # Free groups by their limit in bytes, since setting a limit is slow.
        self._free: dict[int, list[Path]] = {}
        self._numbers = itertools.count()
        self._remove_left_over()
        atexit.register(self.close)

    @contextmanager
    def borrow(self, memory: int) -> Generator[Path]:
        """Yield the folder of a group with a limit of `memory` bytes.

        Raises:
            OSError: the group cannot be created.
        """
        free = self._free.setdefault(memory, [])
        group = free.pop() if free else self._made(memory)
        try:
            yield group
        finally:
            free.append(group)

    def _made(self, memory: int) -> Path:
        group = self._place / f"{_NAME}{os.getpid()}-{next(self._numbers)}"
        group.mkdir()
        limit = group / "memory.limit_in_bytes"
        (limit if limit.exists() else group / "memory.max").write_text(str(memory), encoding="ascii")
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            if (group / name).exists():
                (group / name).write_text(value, encoding="ascii")
        return group

    def close(self) -> None:
        """Remove the groups."""
        for group in itertools.chain.from_iterable(self._free.values()):
            with suppress(OSError):
                group.rmdir()
        self._free.clear()

    def _remove_left_over(self) -> None:
        """Remove the groups of processes that no longer exist."""
        for group in self._place.glob(f"{_NAME}*-*"):
            pid = group.name.removeprefix(_NAME).partition("-")[0]
            if not Path("/proc", pid).exists():
                with suppress(OSError):
                    group.rmdir()


def place_of_groups(folder: str | None) -> Path | None:
    """Return where a process may create groups with bounded memory, given the folder of its own group; None: nowhere.

    A group with processes cannot have bounded groups below it, so they go beside it, if the parent group is delegated
    to the user, as systemd does for `user@.service` and units with `Delegate=yes`. Version 1 is not used, as entering a
    group takes as long as a short program.
    """
    place = Path(folder).parent if folder is not None else None
    if place is None:
        return None
    try:
        bounded = "memory" in (place / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return None
    return place if bounded and os.access(place, os.W_OK) and os.access(place / "cgroup.procs", os.W_OK) else None


@cache
def memory_groups() -> MemoryGroups | None:
    """Return the groups of this process; None if it may not create any."""
    own = own_group()
    place = place_of_groups(own.path if own is not None else None)
    return None if place is None else MemoryGroups(place)
