"""The identity of a process in a file that outlives it, and signals to that process and no other.

A pid alone is not unique: later processes, and processes of other containers and machines, may have the same. So the
kernel's boot id, the pid namespace and the start time go with it. A field that is missing in a file equals no value.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_core.process.proc import boot_id, identity, namespace, read

# Lower pids mean the first process of the machine or container (1), the caller's group (0), and all processes (-1).
_LEAST_PID: Final = 2
_START: Final = re.compile(r"([1-9]\d*):\d+")


class Presence(StrEnum):
    """The result of looking for a process from here."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


class ProcessIdentity(NamedTuple):
    """The identity of a process. An empty field is unknown.

    Attributes:
        pid, start: the pid, and `PID:START`, where START is its start in clock ticks since boot.
        host: the name of the machine or container.
        boot: the random id of the kernel's boot.
        pid_namespace: the inode of the namespace of the pid; 0 if unknown.
        machine: a digest of the installation's id (`/etc/machine-id`).
    """

    pid: int
    start: str
    host: str = ""
    boot: str = ""
    pid_namespace: int = 0
    machine: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'a machine that is not named'}"


class UnprovenProcessError(Exception):
    """An error for a process that could not be identified with certainty; the message says why."""


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    start = (identity(pid) or "") if _counts_in_own_namespace() else ""
    return ProcessIdentity(pid, start, socket.gethostname(), boot_id(), namespace("pid"), machine_id())


def identity_here(pid: int) -> ProcessIdentity:
    """Return the identity of a living process of this pid namespace.

    Raises:
        ProcessLookupError: the process does not exist.
    """
    start = identity(pid)
    if start is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return own_identity()._replace(pid=pid, start=start)


def machine_id() -> str:
    """Return a digest of the id of this installation; empty if there is no id, as in many containers."""
    text = read("/etc/machine-id").decode("ascii", "replace").strip()
    return hashlib.sha256(f"rlinf {text}".encode()).hexdigest()[:16] if text else ""


def look(process: ProcessIdentity, written: float = 0.0) -> Presence:
    """Return whether a process exists, as far as this process can see.

    Args:
        process: the process, as its own file describes it.
        written: the time when that file was last written, in seconds since 1970.
    """
    start = _START.fullmatch(process.start)
    if process.pid < 1 or start is None or int(start[1]) != process.pid:
        return Presence.UNKNOWN
    own = own_identity()
    if not process.boot or not process.pid_namespace:
        # Written by an earlier rlinf: a process that matches lives, and one that does not may be on any machine.
        same_host = process.host == own.host and _counts_in_own_namespace()
        return Presence.ALIVE if same_host and identity(process.pid) == process.start else Presence.UNKNOWN
    if process.boot != own.boot:
        return Presence.GONE if _is_earlier_boot(process, own, written) else Presence.UNKNOWN
    if process.pid_namespace != own.pid_namespace or not _counts_in_own_namespace():
        return Presence.UNKNOWN
    return _look_here(process)


@contextmanager
def held(process: ProcessIdentity, folder: Path) -> Generator[int, None, None]:
    """Hold a process within the block, so that its pid cannot be reused; yield the handle for `send`.

    Args:
        process: the process, as its own file describes it.
        folder: a folder that it has open for as long as it lives. A file could describe any process, but only the
            right one has this folder open.

    Raises:
        UnprovenProcessError: the process cannot be identified with certainty, or must not be signalled.
        ProcessLookupError: the process has ended.
        PermissionError: the process belongs to another user.
    """
    with opened(process) as handle:
        if not _has_open(process.pid, folder):
            raise UnprovenProcessError(f"process {process.pid} does not have the folder open, as its driver would")
        yield handle


@contextmanager
def opened(process: ProcessIdentity) -> Generator[int, None, None]:
    """Hold a process within the block as `held` does, for an identity that only its own process can have written.

    Raises: as `held`.
    """
    if process.pid < _LEAST_PID:
        raise UnprovenProcessError(f"process {process.pid} is never signalled")
    if not process.boot or not process.pid_namespace:
        raise UnprovenProcessError("an earlier rlinf wrote neither the boot nor the name space of its process")
    handle = os.pidfd_open(process.pid)
    try:
        # If the process is alive now, it has had its pid all the time, so the handle is that of this process.
        presence = look(process)
        if presence is Presence.GONE:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if presence is Presence.UNKNOWN:
            raise UnprovenProcessError(f"{process} cannot be seen from here")
        yield handle
    finally:
        os.close(handle)


def send(handle: int, number: int) -> None:
    """Send a signal to the process of a handle.

    Raises:
        ProcessLookupError: the process has ended.
        PermissionError: the process belongs to another user.
    """
    signal.pidfd_send_signal(handle, number)


def _look_here(process: ProcessIdentity) -> Presence:
    if identity(process.pid) == process.start:
        return Presence.ALIVE
    if os.path.exists(f"/proc/{process.pid}"):
        return Presence.GONE  # it is a zombie, or a later process has its pid
    # /proc may hide processes of other users; `pidfd_open` tells whether the pid exists.
    try:
        os.close(os.pidfd_open(process.pid))
    except ProcessLookupError:
        return Presence.GONE
    except OSError:
        return Presence.GONE if os.path.exists("/proc/1") else Presence.UNKNOWN
    return Presence.UNKNOWN


def _is_earlier_boot(process: ProcessIdentity, own: ProcessIdentity, written: float) -> bool:
    """Return whether a process of an earlier boot ran on this machine, which has rebooted since."""
    same = (process.host, process.machine, process.pid_namespace) == (own.host, own.machine, own.pid_namespace)
    booted = _booted()
    # Machines made from one image have equal names. But a process that runs on another one writes after our boot.
    return same and bool(own.machine and own.host and own.boot) and booted is not None and 0 < written < booted


def _booted() -> float | None:
    """Return the time when this machine booted, in seconds since 1970."""
    lines = (line.split() for line in read("/proc/stat").splitlines())
    return next((float(line[1]) for line in lines if line[:1] == [b"btime"]), None)


def _counts_in_own_namespace() -> bool:
    """Return whether /proc shows this process's pid name space; under `unshare --pid` it may show the outer one."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _has_open(pid: int, folder: Path) -> bool:
    """Return whether a process has a folder open.

    Raises:
        PermissionError: the process belongs to another user.
    """
    wanted = os.stat(folder, follow_symlinks=False)
    names = os.listdir(f"/proc/{pid}/fd")
    for name in names:
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return True
        except OSError:
            continue
    return False
