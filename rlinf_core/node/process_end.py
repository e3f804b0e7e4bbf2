"""The ends of processes of this machine: by which signal, or with which exit code.

A process learns that of its own children alone; workers are children of Ray. Since Linux 6.15 a descriptor of a process
keeps how it ended (`PIDFD_GET_INFO`, include/uapi/linux/pidfd.h). Where the kernel is older, nothing is said.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from contextlib import suppress
from typing import Final, NamedTuple

from rlinf_core.errors import ProcessEnd
from rlinf_core.node.control_group import own_group
from rlinf_core.node.kernel_log import memory_kill

# `struct pidfd_info` of its first version: mask, cgroupid, eleven numbers of 32 bits, exit_code.
_INFO: Final = struct.Struct("=QQ11Ii")
_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT: Final = 1 << 3


class _Watched(NamedTuple):
    pid: int
    descriptor: int
    since: float
    kills: int | None


class EndWatch:
    """Descriptors of processes of this machine, taken while they live."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def watch(self, name: str, pid: int) -> None:
        """Watch the living process `pid` under a name, in the place of one before."""
        self.drop(name)
        with suppress(OSError):
            group = own_group()
            since = time.clock_gettime(time.CLOCK_MONOTONIC)
            self._watched[name] = _Watched(pid, os.pidfd_open(pid), since, group.kills if group is not None else None)

    def drop(self, name: str) -> None:
        """Stop to watch."""
        watched = self._watched.pop(name, None)
        if watched is not None:
            os.close(watched.descriptor)

    def is_watched(self, name: str) -> bool:
        """Return whether the end of this process may become known."""
        return name in self._watched

    def end(self, name: str) -> ProcessEnd | None:
        """Return how a watched process ended; None while it lives or is not collected by its parent, or if unknown."""
        watched = self._watched.get(name)
        status = wait_status(watched.descriptor) if watched is not None else None
        if watched is None or status is None:
            return None
        code = os.waitstatus_to_exitcode(status)
        end = ProcessEnd.from_exit_code(code)
        return end._replace(out_of_memory=self._memory(watched)) if code == -signal.SIGKILL else end

    def _memory(self, watched: _Watched) -> str | None:
        """Return the kernel's words on a kill for memory, of this pid or in this process's own control group."""
        line = memory_kill(watched.pid, watched.since)
        if line is not None or watched.kills is None:
            return line
        group = own_group()
        if group is None or group.kills is None or group.kills <= watched.kills:
            return None
        return f"{group.kills - watched.kills} killed for memory in the control group {group.path} meanwhile"


def has_ended(descriptor: int) -> bool:
    """Return whether the process of a pidfd has ended."""
    # Beside many peers a descriptor may be beyond 1,023, which `select` does not take.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def wait_status(descriptor: int) -> int | None:
    """Return the status, as of `os.wait`, of the process of a pidfd; None while it is not known."""
    if not has_ended(descriptor):
        return None
    info = bytearray(_INFO.pack(_EXIT, 0, *[0] * 12))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _EXIT else None
