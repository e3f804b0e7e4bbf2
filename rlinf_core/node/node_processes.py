"""Processes, ports and files of one node: what is there, whose it is, and ending what is ours.

    python -I -S node_processes.py FOLDER    waits until its standard input ends, then ends a driver's embedded Ray

Travels to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

# Every process that a Ray of ours starts inherits it, which tells it from those of others. Its value is the id of the
# cluster, or the driver's folder where the Ray is embedded.
MARK = "RLINF_RAY"
# In the commands of Ray's own processes.
_ENGINE = (b"ray::", b"/ray/core/src/ray/", b"/ray/_private/", b"/ray/dashboard/")
_KILL_SECONDS = 5.0
_PAUSE = 0.1
_LISTEN = "0A"


def identity(pid: int) -> str | None:
    """Return `PID:START`, which no later process with the same pid shares; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    # One that was killed may wait for its parent to take note of it.
    return None if fields[0] in "ZX" else f"{pid}:{fields[19]}"


def alive(written: object) -> bool:
    """Return whether the process of a written identity still lives."""
    pid = str(written).split(":")[0]
    return pid.isdigit() and identity(int(pid)) == written


def processes_of(owner: str, folder: str, *, engine_only: bool = False) -> list[int]:
    """Return the living processes of a Ray, without this one.

    They carry its mark in their environment. Those of Ray that give themselves a title write over it; they are known by
    files of its folder that they have open.

    Args:
        owner: the value of the mark.
        folder: of the Ray.
        engine_only: whether to leave out what users' code has started by itself.
    """
    mark = b"\0" + f"{MARK}={owner}".encode() + b"\0"
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            engine = any(each in command for each in _ENGINE)
            if engine_only and not engine:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                ours = mark in b"\0" + file.read()
        except OSError:
            continue  # it ended, or is another user's
        ours = ours or (engine and any(target.startswith(f"{folder}/") for target in _open_files(int(name))))
        if ours and identity(int(name)) is not None:
            found.append(int(name))
    return found


def command_of(pid: int) -> str | None:
    """Return the command of a process as Ray writes that of a driver, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return subprocess.list2cmdline(file.read().split("\0")[:-1])
    except OSError:
        return None


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def wait_gone(owner: str, folder: str, seconds: float) -> None:
    """Wait until none of a Ray's processes is there, or the time is over."""
    end = time.monotonic() + seconds
    while processes_of(owner, folder) and time.monotonic() < end:
        time.sleep(_PAUSE)


def kill_all(owner: str, folder: str, *, engine_only: bool = False) -> list[int]:
    """Kill every process of a Ray, also those that are started meanwhile; return those that don't end."""
    end = time.monotonic() + _KILL_SECONDS
    left = processes_of(owner, folder, engine_only=engine_only)
    while left and time.monotonic() < end:
        send(left, signal.SIGKILL)
        time.sleep(_PAUSE)
        left = processes_of(owner, folder, engine_only=engine_only)
    return left


def guard(folder: str) -> subprocess.Popen[bytes]:
    """Start the guardian of this process's embedded Ray; it ends Ray when this process ends or closes its `stdin`.

    Ray's own processes don't always end with their driver: its agents try to tell a head that is gone. The guardian is
    no child of Ray. It waits for a pipe whose other end only the driver holds: the kernel closes it, however that ends.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C and a hang-up of the terminal are the driver's; the guardian outlives it.
        start_new_session=True,
    )


def reap(folder: str) -> None:
    """End what is left of the embedded Ray of a driver that is gone, and remove the driver's folder."""
    kill_all(folder, folder, engine_only=True)
    shutil.rmtree(folder, ignore_errors=True)


class Holdings(NamedTuple):
    """The resources that a cluster's processes hold besides memory of their own.

    Attributes:
        ports: TCP ports that they listen on.
        shared: files of theirs in /dev/shm.
        folders: folders of theirs beside the cluster's own, such as those of sockets.
    """

    ports: list[int]
    shared: list[str]
    folders: list[str]


def holdings(pids: list[int]) -> Holdings:
    """Return what processes hold now; asked before they are ended, to see afterwards that it is gone."""
    prefix = os.path.join(tempfile.gettempdir(), "rlinf-")
    owners = listeners()
    ports = sorted(port for port, pid in owners.items() if pid in set(pids))
    shared: set[str] = set()
    folders: set[str] = set()
    for pid in pids:
        for path in _mapped(pid):
            if path.startswith("/dev/shm/"):
                shared.add(path)
        for target in _open_files(pid):
            if target.startswith("/dev/shm/") and not target.endswith(" (deleted)"):
                shared.add(target)
            elif target.startswith(prefix) and os.path.isdir(target):
                folders.add(target)
    return Holdings(ports, sorted(shared), sorted(folders))


def _mapped(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    paths = {line.split(None, 5)[5] for line in lines if "/dev/shm/" in line}
    return [path for path in paths if not path.endswith(" (deleted)")]


def _open_files(pid: int) -> list[str]:
    found: list[str] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return found


def listeners() -> dict[int, int]:
    """Return every TCP port that somebody listens on in this network, with the pid, or 0 where that cannot be seen."""
    port_of: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii", errors="replace") as file:
                rows = [line.split() for line in file.read().splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if len(row) > 9 and row[3] == _LISTEN:
                port_of[f"socket:[{row[9]}]"] = int(row[1].rpartition(":")[2], 16)
    owner = dict.fromkeys(port_of.values(), 0)
    for name in os.listdir("/proc"):
        if name.isdigit():
            for target in _open_files(int(name)):
                port = port_of.get(target)
                if port is not None:
                    owner[port] = int(name)
    return owner


def described(pid: int) -> str:
    """Return a process as a message names it: `pid 123, sshd`."""
    if not pid:
        return "a process of another user"
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return f"pid {pid}, `{file.read().strip()}`"
    except OSError:
        return f"pid {pid}"


def answers(address: str, port: int, seconds: float = 0.5) -> OSError | None:
    """None when something accepts connections there, else what came instead."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return None
    except OSError as error:
        return error


def remove(path: str) -> str | None:
    """Remove a file or a folder with all in it; what is left of it, or None."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass
    return path if os.path.lexists(path) else None


def reap_sockets() -> None:
    """Remove the folders of sockets whose processes are gone: each is locked for as long as its process lives."""
    prefix = f"rlinf-{os.getuid()}-"
    for base in {tempfile.gettempdir(), "/tmp"}:
        for name in os.listdir(base):
            path = os.path.join(base, name)
            if not name.startswith(prefix) or os.path.islink(path):
                continue
            try:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # its process lives
            finally:
                os.close(lock)


def tail(path: str, lines: int = 12, size: int = 16384) -> str:
    """Return the last lines of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
