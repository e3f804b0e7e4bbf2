"""Processes of one node: finding and ending those of a Ray that rlinf started.

    python -I -S node_processes.py FOLDER    waits until its standard input ends, then ends a driver's embedded Ray

Travels to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

# Every process that a Ray of ours starts inherits it, which distinguishes it from those of others. Its value is the id
# of the cluster, or the driver's folder where the Ray is embedded.
MARK = "RLINF_RAY"
# In the commands of Ray's own processes.
_ENGINE = (b"ray::", b"/ray/core/src/ray/", b"/ray/_private/", b"/ray/dashboard/")
_KILL_SECONDS = 5.0
_PAUSE = 0.1


def identity(pid: int) -> str | None:
    """Return `PID:START`, unique even if the pid is reused; None if there is no such process."""
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
    """Return the living processes of a Ray instance, without this one.

    They carry its mark in their environment. Those of Ray that give themselves a title write over it; they are known by
    files of its folder that they have open. Those of containers are left out: a cluster in there may have the same
    name.

    Args:
        owner: the value of the mark.
        folder: the folder of Ray's session.
        engine_only: leave out processes that users' code started.
    """
    mark = b"\0" + f"{MARK}={owner}".encode() + b"\0"
    own_namespace = os.stat("/proc/self/ns/pid").st_ino
    pids: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            engine = any(mark in command for mark in _ENGINE)
            if engine_only and not engine:
                continue
            if os.stat(f"/proc/{name}/ns/pid").st_ino != own_namespace:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                ours = mark in b"\0" + file.read()
        except OSError:
            continue  # it ended, or is another user's
        ours = ours or (engine and any(target.startswith(f"{folder}/") for target in open_files(int(name))))
        if ours and identity(int(name)) is not None:
            pids.append(int(name))
    return pids


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def kill_all(owner: str, folder: str, *, engine_only: bool = False) -> list[int]:
    """Kill every process of a Ray instance, including those started meanwhile; return those that survive."""
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
    guardian is not a child of Ray. It waits on a pipe whose other end only the driver holds: the kernel closes it
    however the driver ends.
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
    """End the remaining processes of a dead driver's embedded Ray, and remove the driver's folder."""
    kill_all(folder, folder, engine_only=True)
    shutil.rmtree(folder, ignore_errors=True)


def open_files(pid: int) -> list[str]:
    """Return the paths of what a process has open; none where that cannot be seen."""
    paths: list[str] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return paths
    for name in names:
        try:
            paths.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return paths


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
