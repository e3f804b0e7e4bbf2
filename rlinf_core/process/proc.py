"""Processes of this machine as the kernel shows them (proc(5), namespaces(7), unix(7)), abstract Unix sockets, and the
end of rlinf's own Ray.

    python -I -S proc.py FOLDER    waits until its standard input ends, then ends a driver's embedded Ray

If a process has ended, or is hidden from this user, functions return an empty value; they raise no error. An abstract
socket is a name in a network namespace, bound by one process until the kernel frees it. Any user can bind any name; the
kernel tells which user made a socket.

Travels to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

# A variable in the environment of every process of rlinf's own Ray, and of no other Ray. Its value is the id of the
# cluster, or the driver's folder for an embedded Ray.
MARK = "RLINF_RAY"
# Substrings of the commands of Ray's own processes.
_ENGINE = (b"ray::", b"/ray/core/src/ray/", b"/ray/_private/", b"/ray/dashboard/")
_KILL_SECONDS = 5.0
_PAUSE = 0.1
_CREDENTIALS = struct.Struct("3i")


class Stat(NamedTuple):
    """The state of a process.

    Attributes:
        state: its letter in proc(5); a space if it has ended.
        parent: the pid of its parent.
        ticks: the processor time that it has used, in clock ticks.
        start: its start, in clock ticks since the boot.
    """

    state: str = " "
    parent: int = 0
    ticks: int = 0
    start: str = ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a tracer has stopped it."""
        return self.state in "Tt"


def stat(pid: int) -> Stat:
    """Return the state of a process."""
    # The command, in parentheses, may itself hold parentheses and blanks.
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        return Stat()
    return Stat(fields[0].decode(), int(fields[1]), int(fields[11]) + int(fields[12]), fields[19].decode())


def identity(pid: int) -> str | None:
    """Return `PID:START`, unique even if the pid is reused; None if there is no such process."""
    shown = stat(pid)
    # A zombie (Z, X) has ended, though its parent has not reaped it.
    return None if shown.state in " ZX" else f"{pid}:{shown.start}"


def alive(written: object) -> bool:
    """Return whether the process with this identity still lives."""
    pid = str(written).split(":")[0]
    return pid.isdigit() and identity(int(pid)) == written


def pids() -> list[int]:
    """Return the pids of the processes that this one sees."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command(pid: int) -> bytes:
    """Return the command of a process: its arguments, each ending in NUL, or the title that it set."""
    return read(f"/proc/{pid}/cmdline")


def spell_command(pid: int) -> str:
    """Return the command of a process as readable text."""
    return command(pid).replace(b"\0", b" ").decode("utf-8", "replace").strip()


def fields(path: str) -> dict[str, str]:
    """Return the fields of a file with lines `NAME: VALUE`, such as `/proc/PID/status` or `/proc/meminfo`."""
    pairs = (line.partition(":") for line in read(path).decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def open_files(pid: int) -> dict[str, str]:
    """Return the open files of a process: the target of each link in `/proc/PID/fd`, by the link's path."""
    paths: dict[str, str] = {}
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return paths
    for name in names:
        try:
            paths[f"{folder}/{name}"] = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
    return paths


def boot_id() -> str:
    """Return the id of the kernel's current boot; empty if hidden."""
    return read("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()


def namespace(kind: str, pid: int | str = "self") -> int:
    """Return the inode of a process's namespace of a kind, such as `pid` or `net`; 0 if hidden."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except OSError:
        return 0


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and uid of the process at the other end of a unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def tail(path: str | os.PathLike[str], size: int) -> str:
    """Return the last `size` bytes of a file, as text."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def read(path: str) -> bytes:
    """Return the content of a file of the kernel; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def processes_of(owner: str, folder: str, *, engine_only: bool = False) -> list[int]:
    """Return the pids of the living processes of a Ray instance, without this one.

    They have its mark in their environment. Processes of Ray that set a title overwrite it; they are recognized by
    open files of the instance's folder. Processes in containers are left out: a cluster there may have the same name.

    Args:
        owner: the value of the mark.
        folder: the folder of Ray's session.
        engine_only: whether to leave out processes that users' code started.
    """
    mark = b"\0" + f"{MARK}={owner}".encode() + b"\0"
    own_namespace = namespace("pid")
    living: list[int] = []
    for pid in pids():
        title = command(pid)
        engine = any(part in title for part in _ENGINE)
        if pid == os.getpid() or (engine_only and not engine) or namespace("pid", pid) != own_namespace:
            continue
        ours = mark in b"\0" + read(f"/proc/{pid}/environ")
        ours = ours or (engine and any(path.startswith(f"{folder}/") for path in open_files(pid).values()))
        if ours and identity(pid) is not None:
            living.append(pid)
    return living


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def kill_all(owner: str, folder: str, *, engine_only: bool = False) -> list[int]:
    """Kill every process of a Ray instance, including those started meanwhile; return the pids of survivors."""
    end = time.monotonic() + _KILL_SECONDS
    remaining = processes_of(owner, folder, engine_only=engine_only)
    while remaining and time.monotonic() < end:
        send(remaining, signal.SIGKILL)
        time.sleep(_PAUSE)
        remaining = processes_of(owner, folder, engine_only=engine_only)
    return remaining


def guard(folder: str) -> subprocess.Popen[bytes]:
    """Start the guardian of this process's embedded Ray; it ends Ray when this process ends or closes its `stdin`.

    Ray's own processes don't always end with their driver: its agents keep trying to reach a head that is gone. The
    guardian is not a child of Ray. It waits on a pipe whose other end only the driver holds, and which the kernel
    closes in whatever way the driver ends.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C and a hang-up of the terminal must reach only the driver, which the guardian outlives.
        start_new_session=True,
    )


def reap(folder: str) -> None:
    """End the remaining processes of a dead driver's embedded Ray, and remove the driver's folder."""
    kill_all(folder, folder, engine_only=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])


# Peak memory of a process, by phase.


# Of the calls of a phase, the first `_FIRST` and then every `_EVERY`th are measured.
_FIRST, _EVERY = 8, 16


class Peak(NamedTuple):
    """The most memory that a process held in a phase, in bytes.

    Attributes:
        rss: the memory of the host, including mapped shared memory.
        device: the memory of its accelerator, as torch counts it; 0 without an accelerator.
    """

    rss: int
    device: int = 0


class PeakMeter:
    """A meter of the peak memory of each phase of this process; `peaks` holds the largest so far."""

    def __init__(self) -> None:
        self.peaks: dict[str, Peak] = {}
        self._calls: dict[str, int] = {}

    @contextmanager
    def during(self, phase: str) -> Generator[None, None, None]:
        """Measure a block; after the first 8 calls of a phase only every 16th is measured."""
        count = self._calls[phase] = self._calls.get(phase, 0) + 1
        if count > _FIRST and count % _EVERY:
            yield
            return
        _forget_peak()
        try:
            yield
        finally:
            before, now = self.peaks.get(phase, Peak(0)), _peak()
            self.peaks[phase] = Peak(max(before.rss, now.rss), max(before.device, now.device))


def rss_fields() -> dict[str, int]:
    """Return `VmRSS` and its peak `VmHWM` in bytes; empty if the system does not report them."""
    status = fields("/proc/self/status")
    return {name: int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM") if name in status}


def _forget_peak() -> None:
    # 5 resets the peak of the resident set (proc(5)).
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    cuda = _cuda()
    if cuda is not None:
        cuda.reset_peak_memory_stats()


def _peak() -> Peak:
    cuda = _cuda()
    return Peak(rss_fields().get("VmHWM", 0), 0 if cuda is None else int(cuda.max_memory_allocated()))


def _cuda() -> Any:
    """Return torch's accelerator module if this process uses one."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


# Signals that processes started by this one must not take.


# Schedulers send these to all processes of a job some time before it ends (Slurm's `--signal`, LSF, Grid Engine). Only
# a driver acts on them; by default they end a process.
SCHEDULER_WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})


@contextmanager
def warnings_blocked() -> Generator[None, None, None]:
    """Block schedulers' warning signals in processes started in the block; this process handles them afterwards."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_WARNINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def ignore_warnings() -> None:
    """Ignore schedulers' warning signals, in this process and its children."""
    for number in SCHEDULER_WARNINGS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def sigterm_deferred() -> Generator[None, None, None]:
    """Block SIGTERM, within the block, for this thread and for threads started in the block; it stays pending.

    While Ray's native code handles SIGTERM, no thread of the process may take it. Start no process within the block: it
    would inherit the blocked SIGTERM.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


_ASK_SECONDS = 1.0
_MAX_BYTES = 4096
# The formats of sock_diag(7): a header, then the request; the reply has a header, then attributes.
_HEADER, _REQUEST = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII")
_SOCK_DIAG, _BY_FAMILY, _IS_REQUEST, _SHOW_USER, _USER = 4, 20, 1, 0x40, 7
_ATTRIBUTES_AT = _HEADER.size + 16


def bind(name: str) -> socket.socket | None:
    """Return a socket bound to this name; None if the name is taken.

    Raises:
        OSError: the bind failed for another reason.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(f"\0{name}")
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return sock


def bound(prefix: str) -> list[str]:
    """Return the names with this prefix that this user's processes have bound in this network namespace, sorted."""
    names: set[str] = set()
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        for line in file:
            head, _, path = line.rstrip("\n").rpartition(" ")
            if path.startswith(f"@{prefix}") and path[1:] not in names and _is_own(path[1:], head.rpartition(" ")[2]):
                names.add(path[1:])
    return sorted(names)


def _is_own(name: str, number: str) -> bool:
    """Return whether this user made the socket with this inode number; True if the kernel does not tell."""
    user = _owner(int(number)) if number.isdecimal() else None
    if user is None:
        # The kernel is older than 5.3, or this is a sandbox.
        with suppress(OSError), connected(name, _ASK_SECONDS) as connection:
            user = peer_credentials(connection)[1]
    return user in (None, os.getuid())


def _owner(number: int) -> int | None:
    """Return the uid of the maker of a Unix socket, by sock_diag(7); None if the kernel does not tell."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, number, _SHOW_USER, 0xFFFFFFFF, 0xFFFFFFFF)
    header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _IS_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_ASK_SECONDS)
            kernel.send(header + request)
            data = kernel.recv(_MAX_BYTES)
    except OSError:
        return None
    at = _ATTRIBUTES_AT if len(data) >= _HEADER.size and _HEADER.unpack_from(data)[1] == _BY_FAMILY else len(data)
    while at + 8 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if kind == _USER:
            return int(struct.unpack_from("=I", data, at + 4)[0])
        at += max(4, (size + 3) & ~3)
    return None


def connected(name: str, seconds: float) -> socket.socket:
    """Return a connection to the process that listens at a name.

    Raises:
        OSError: no process listens there, or it does not accept in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection
