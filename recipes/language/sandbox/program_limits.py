"""Limits of a whole program: a filter of system calls, and control groups that bound the memory of all its processes.

The filter refuses calls that use memory outside of a process's limits, or reach beyond its namespaces. Its instructions
are written out, as `pyseccomp` would require libseccomp on each node for only forty instructions. A control group also
counts kernel memory such as socket buffers, which no limit of a process counts.
"""

from __future__ import annotations

import atexit
import itertools
import os
import platform
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_core.node.process_life import own_group

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


class _Architecture(NamedTuple):
    """The system calls of a machine architecture.

    Attributes:
        number: the kernel's number of the architecture.
        refused: calls to refuse. Keys have no namespace; System V segments and queues, memory files, rings and BPF
            programs count toward no limit of a process. A ring can also create sockets. A real-time scheduler, if
            allowed by inherited limits, would take a processor from everybody.
        sockets: calls that create a socket, with its family as first argument.
    """

    number: int
    refused: tuple[int, ...]
    sockets: tuple[int, ...]


_ARCHITECTURES: Final = {
    # shmget, semget, msgget, add_key, request_key, keyctl, memfd_create, bpf, userfaultfd, io_uring_setup,
    # memfd_secret, sched_setparam, sched_setscheduler, sched_setattr; socket, socketpair. Neither has `socketcall`.
    "x86_64": _Architecture(0xC000003E, (29, 64, 68, 248, 249, 250, 319, 321, 323, 425, 447, 142, 144, 314), (41, 53)),
    "aarch64": _Architecture(
        0xC00000B7, (194, 190, 186, 217, 218, 219, 279, 280, 282, 425, 447, 118, 119, 274), (198, 199)
    ),
}
# AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, which a network namespace isolates. It does not isolate AF_VSOCK, which
# connects a virtual machine with its host.
_FAMILIES: Final = (1, 2, 10, 16)
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
# Allow; refuse with EPERM; refuse with EAFNOSUPPORT; end the process.
_ALLOW, _REFUSE, _NO_FAMILY, _END = 0x7FFF0000, 0x00050001, 0x00050061, 0x80000000
# Offsets in the kernel's description of a call; that of the first argument is of its lower half, the socket family.
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
# From here on, numbers belong to x86's x32 ABI, which has a second number for each call.
_X32: Final = 0x40000000

_Step = tuple[int, str, int]


def call_filter(machine: str | None = None) -> bytes | None:
    """Return a filter for bubblewrap, or None if the machine's calls are unknown.

    Args:
        machine: the architecture, such as `x86_64`; by default this machine's.
    """
    architecture = _ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return None
    # The operation, the label to jump to if a comparison holds, and the operand.
    steps: list[_Step] = [(_LOAD, "", _ARCHITECTURE_AT), (_EQUAL, "number", architecture.number), (_RETURN, "", _END)]
    labels = {"number": len(steps)}
    steps += [(_LOAD, "", _NUMBER_AT), (_AT_LEAST, "refuse", _X32)]
    steps += [(_EQUAL, "refuse", call) for call in architecture.refused]
    steps += [(_EQUAL, "family", call) for call in architecture.sockets]
    steps += [(_RETURN, "", _ALLOW)]
    labels["family"] = len(steps)
    steps += [(_LOAD, "", _ARGUMENT_AT), *((_EQUAL, "allow", family) for family in _FAMILIES)]
    steps += [(_RETURN, "", _NO_FAMILY)]
    labels["allow"] = len(steps)
    steps += [(_RETURN, "", _ALLOW)]
    labels["refuse"] = len(steps)
    steps += [(_RETURN, "", _REFUSE)]
    return b"".join(
        struct.pack("=HBBI", operation, labels[target] - at - 1 if target else 0, 0, operand)
        for at, (operation, target, operand) in enumerate(steps)
    )
