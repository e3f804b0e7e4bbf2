"""The identity of a process in a file that outlives it, and signals to that process and no other.

A pid alone is a number that other processes get later, and at the same time in other containers and machines. So the
boot of the kernel, the name space of pids and the start go with it. What a file does not say is never taken for equal.
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

# Lower ones are the first process of the machine or container, the caller's group, and everybody.
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
        pid, start: its number, and `PID:START` with the ticks from boot to its start.
        host: name of the machine or container.
        boot: id that the kernel drew when it started.
        pid_namespace: inode of the name space that the pid counts in; 0: not known.
        machine: digest of the installation's id (`/etc/machine-id`).
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
    """A process could not be identified with certainty; the message says why."""


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    start = (identity(pid) or "") if _counts_in_own_namespace() else ""
    return ProcessIdentity(pid, start, socket.gethostname(), boot_id(), namespace("pid"), machine_id())


def identity_here(pid: int) -> ProcessIdentity:
    """Return the identity of a living process of this name space of pids.

    Raises:
        ProcessLookupError: it does not exist.
    """
    start = identity(pid)
    if start is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return own_identity()._replace(pid=pid, start=start)


def machine_id() -> str:
    """Return a digest of the id of this installation; empty where there is none, as in many containers."""
    text = read("/etc/machine-id").decode("ascii", "replace").strip()
    return hashlib.sha256(f"rlinf {text}".encode()).hexdigest()[:16] if text else ""


def look(process: ProcessIdentity, written: float = 0.0) -> Presence:
    """Return whether a process exists, as far as this process can see.

    Args:
        process: the process, as its own file describes it.
        written: when that was written last, in seconds since 1970.
    """
    start = _START.fullmatch(process.start)
    if process.pid < 1 or start is None or int(start[1]) != process.pid:
        return Presence.UNKNOWN
    own = own_identity()
    if not process.boot or not process.pid_namespace:
        # Of an earlier rlinf: one that matches lives, and one that does not may be anywhere.
        same_host = process.host == own.host and _counts_in_own_namespace()
        return Presence.ALIVE if same_host and identity(process.pid) == process.start else Presence.UNKNOWN
    if process.boot != own.boot:
        return Presence.GONE if _is_earlier_boot(process, own, written) else Presence.UNKNOWN
    if process.pid_namespace != own.pid_namespace or not _counts_in_own_namespace():
        return Presence.UNKNOWN
    return _look_here(process)


@contextmanager
def held(process: ProcessIdentity, folder: Path) -> Generator[int, None, None]:
    """Hold a process within the block, so that its pid can mean no other; yield the handle for `send`.

    Args:
        process: the process, as its own file describes it.
        folder: the folder that it has open for as long as it lives. A file can describe any process; only the one that
            is meant has opened this very folder.

    Raises:
        UnprovenProcessError: it cannot be identified with certainty, or must not be signalled.
        ProcessLookupError: it has ended.
        PermissionError: it is another user's.
    """
    with opened(process) as handle:
        if not _has_open(process.pid, folder):
            raise UnprovenProcessError(f"process {process.pid} does not have the folder open, as its driver would")
        yield handle


@contextmanager
def opened(process: ProcessIdentity) -> Generator[int, None, None]:
    """Hold a process within the block as `held` does, for an identity that nobody can have written but its process.

    Raises: as `held`.
    """
    if process.pid < _LEAST_PID:
        raise UnprovenProcessError(f"process {process.pid} is never signalled")
    if not process.boot or not process.pid_namespace:
        raise UnprovenProcessError("an earlier rlinf wrote neither the boot nor the name space of its process")
    handle = os.pidfd_open(process.pid)
    try:
        # The process that is meant has had its pid since it was written down: alive now, it is what was opened.
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
        ProcessLookupError: it has ended.
        PermissionError: it is another user's.
    """
    signal.pidfd_send_signal(handle, number)


def _look_here(process: ProcessIdentity) -> Presence:
    if identity(process.pid) == process.start:
        return Presence.ALIVE
    if os.path.exists(f"/proc/{process.pid}"):
        return Presence.GONE  # a zombie, or a later process
    # /proc may hide what is another user's; a handle shows whether there is such a process.
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
    # Two machines made from one image have all names in common; but only one that runs on writes after our start.
    return same and bool(own.machine and own.host and own.boot) and booted is not None and 0 < written < booted


def _booted() -> float | None:
    """Return when this machine started, in seconds since 1970."""
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
        PermissionError: it is another user's.
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
