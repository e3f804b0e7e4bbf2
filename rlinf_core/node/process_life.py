"""The identity of a process in a file that outlives it, signals to that process and no other, and how it ended.

A pid alone is not unique: later processes, and processes of other containers and machines, may have the same. So the
kernel's boot id, the pid namespace and the start time go with it. A field that is missing in a file equals no value.

A process can wait only for its own children, but workers are children of Ray. Since Linux 6.15 a pidfd keeps the exit
status of its process (`PIDFD_GET_INFO`, include/uapi/linux/pidfd.h). On an older kernel the end stays unknown.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_core.errors import ProcessEnd
from rlinf_core.process.proc import boot_id, identity, namespace, read
from rlinf_core.waiting import is_readable

# The first version of `struct pidfd_info`: mask, cgroupid, eleven numbers of 32 bits, exit_code.
_INFO: Final = struct.Struct("=QQ11Ii")
_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT: Final = 1 << 3
_LOG: Final = "/dev/kmsg"
_MOST_LINES: Final = 20_000
_RECORD_BYTES: Final = 8192
# The inode of the initial pid namespace, whose pids are in the kernel's log (include/linux/proc_ns.h).
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
_NUMBER: Final = re.compile(r"\d+")
_KILL: Final = re.compile(r"[Oo]ut of memory.*: Kill(?:ed)? process (\d+)\b")
_ROOT: Final = Path("/sys/fs/cgroup")
_CONTROLLER: Final = "memory"


class _Watched(NamedTuple):
    pid: int
    descriptor: int
    since: float
    kills: int | None


class EndWatch:
    """A table of pidfds of processes of this machine, opened while the processes live."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def watch(self, name: str, pid: int) -> None:
        """Watch the living process `pid` under a name, in place of an earlier process of that name."""
        self.drop(name)
        with suppress(OSError):
            group = own_group()
            since = time.clock_gettime(time.CLOCK_MONOTONIC)
            self._watched[name] = _Watched(pid, os.pidfd_open(pid), since, group.kills if group is not None else None)

    def drop(self, name: str) -> None:
        """Stop watching the process of a name."""
        watched = self._watched.pop(name, None)
        if watched is not None:
            os.close(watched.descriptor)

    def is_watched(self, name: str) -> bool:
        """Return whether a process is watched under this name."""
        return name in self._watched

    def end(self, name: str) -> ProcessEnd | None:
        """Return how a watched process ended; None while it lives or its parent has not reaped it, or if unknown."""
        watched = self._watched.get(name)
        status = wait_status(watched.descriptor) if watched is not None else None
        if watched is None or status is None:
            return None
        code = os.waitstatus_to_exitcode(status)
        end = ProcessEnd.from_exit_code(code)
        return end._replace(out_of_memory=self._memory(watched)) if code == -signal.SIGKILL else end

    def _memory(self, watched: _Watched) -> str | None:
        """Return a text about a kill for lack of memory, of this pid or in this process's control group, or None."""
        line = memory_kill(watched.pid, watched.since)
        if line is not None or watched.kills is None:
            return line
        group = own_group()
        if group is None or group.kills is None or group.kills <= watched.kills:
            return None
        return f"{group.kills - watched.kills} killed for memory in the control group {group.path} meanwhile"


def has_ended(descriptor: int) -> bool:
    """Return whether the process of a pidfd has ended."""
    return is_readable(descriptor)


def wait_status(descriptor: int) -> int | None:
    """Return the status (as of `os.wait`) of the process of a pidfd; None if it is not known."""
    if not has_ended(descriptor):
        return None
    info = bytearray(_INFO.pack(_EXIT, 0, *[0] * 12))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _EXIT else None


def kernel_lines(pids: Collection[int], since: float = 0.0, path: str = _LOG) -> list[str]:
    """Return the lines of the kernel's log that name one of these pids, oldest first; none if they cannot be read.

    Args:
        pids: the pids, in this process's namespace.
        since: seconds since boot; earlier lines are left out, since they may be about other processes with these pids.
    """
    if not pids or namespace("pid") != _FIRST_NAMESPACE:
        return []
    wanted = {str(pid) for pid in pids}
    return [text for at, text in _lines(path) if at >= since and not wanted.isdisjoint(_NUMBER.findall(text))]


def memory_kill(pid: int, since: float = 0.0, path: str = _LOG) -> str | None:
    """Return the line of the kernel's log about a kill of `pid` for lack of memory, or None."""
    kills = ((_KILL.search(line), line) for line in kernel_lines([pid], since, path))
    return next((line for match, line in kills if match is not None and int(match[1]) == pid), None)


def _lines(path: str) -> list[tuple[float, str]]:
    """Return the lines of the log, each with its seconds since boot (Documentation/ABI/testing/dev-kmsg)."""
    lines: list[tuple[float, str]] = []
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return lines
    with suppress(OSError):  # no line is left
        try:
            while len(lines) < _MOST_LINES:
                try:
                    record = os.read(log, _RECORD_BYTES)
                except BrokenPipeError:
                    continue  # a line was overwritten meanwhile
                if not record:
                    break
                lines += _decoded(record.decode("utf-8", "replace"))
        finally:
            os.close(log)
    return lines


def _decoded(record: str) -> list[tuple[float, str]]:
    head, _, text = record.partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdigit():
        return []
    return [(int(fields[2]) / 1e6, text.splitlines()[0])] if text.strip() else []


class GroupMemory(NamedTuple):
    """The memory of a control group.

    Attributes:
        used, limit, most: bytes in use, allowed, and at the peak; None if the kernel does not report them.
        kills: the number of its own processes, without groups below it, killed for lack of memory; None likewise.
    """

    path: str
    used: int | None
    limit: int | None
    most: int | None
    kills: int | None


def own_group(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> GroupMemory | None:
    """Return the memory of this process's control group; None if it is only in the group of the whole machine."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    groups = [(controllers, path) for _, controllers, path in (line for line in lines if len(line) == 3)]
    # In version 1, the root group counts all processes of the machine.
    version_1 = [
        root / _CONTROLLER / path.lstrip("/")
        for names, path in groups
        if _CONTROLLER in names.split(",") and path != "/"
    ]
    if folder := next(filter(Path.is_dir, version_1), None):
        return _memory_of(folder, "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
    version_2 = [root / path.lstrip("/") for names, path in groups if not names]
    # In version 2, the root group of the machine lacks this file; that of a container has it.
    if folder := next((folder for folder in version_2 if (folder / "memory.events").is_file()), None):
        return _memory_of(folder, "memory.current", "memory.max", "memory.peak")
    return None


def _memory_of(folder: Path, used: str, limit: str, most: str) -> GroupMemory:
    used_now, allowed, peak = (_number(folder / name) for name in (used, limit, most))
    return GroupMemory(str(folder), used_now, allowed, peak, kills_in(folder))


def kills_in(folder: Path) -> int | None:
    """Return how many processes of a group were killed for lack of memory; None if the kernel does not report it."""
    version_1 = folder / "memory.oom_control"
    return _field(version_1 if version_1.exists() else folder / "memory.events.local")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str = "oom_kill") -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = (text.split() for text in lines)
    return next((int(line[1]) for line in words if line[:1] == [name] and line[-1].isdigit()), None)


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
