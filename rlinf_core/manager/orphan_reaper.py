"""Ending what is left of the embedded Ray of a driver that is gone.

    python -I -S orphan_reaper.py FOLDER    waits until its standard input ends, then reaps

Ray's own processes don't always end with their driver: its agents try to tell a head that is gone. So each embedded Ray
has a guardian, which is this file run as a program. It is no child of Ray, and what it waits for is a pipe whose other
end only the driver holds; the kernel closes that, however the driver ends. Standard library only: it starts in 15 ms.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# Tells the processes of an embedded Ray from those of others: all of them inherit it.
MARK = "RLINF_DRIVER_FOLDER"
# What the names of those processes hold; what users' code starts by itself is not ours to end.
_ENGINE = (b"ray::", b"/ray/core/src/ray/", b"/ray/_private/", b"/ray/dashboard/")
_ROUNDS = 25
_PAUSE = 0.2


def guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the guardian of a folder of this process.

    It reaps when this process ends or closes the `stdin` of what is returned.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C and a hang-up of the terminal are the driver's; the guardian outlives it.
        start_new_session=True,
    )


def reap(folder: Path) -> None:
    """End what is left of the embedded Ray of a driver that is gone, and remove the driver's folder."""
    for _ in range(_ROUNDS):
        left = processes_of(folder)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not left:
            break
        # Some start others until they end themselves.
        time.sleep(_PAUSE)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> list[int]:
    """Return the pids of the processes of an embedded Ray, by its driver's folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if any(name in (entry / "cmdline").read_bytes() for name in _ENGINE) and _is_of(entry, folder):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended, or is another user's
    return found


def _is_of(process: Path, folder: Path) -> bool:
    """Return whether a process has inherited the mark, or has a file of the folder open.

    Those that Ray gives a title (`ray::...`) have it written over their environment where it is long.
    """
    mark = b"\0" + f"{MARK}={folder}".encode() + b"\0"
    if mark in b"\0" + (process / "environ").read_bytes():
        return True
    return any(_target(file).startswith(f"{folder}/") for file in (process / "fd").iterdir())


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # it was closed


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]))
