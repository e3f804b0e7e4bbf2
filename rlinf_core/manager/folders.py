"""The private folders of this user's drivers on this machine, and what of a driver that was killed is to be removed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlinf_core.errors import ClusterError

_OWNER_FILE = "owner"
# Tells the processes of an embedded Ray from those of others: all of them inherit it.
MARK = "RLINF_DRIVER_FOLDER"
# What the names of those processes hold; what users' code starts by itself is not ours to end.
_ENGINE = (b"ray::", b"/ray/core/src/ray/", b"/ray/_private/", b"/ray/dashboard/")
_SWEEPS = 5
_SWEEP_PAUSE = 0.2


def new_folder() -> Path:
    """A private folder for this process; those whose owners are gone are removed."""
    base = base_folder()
    for folder in base.iterdir():
        if (folder / _OWNER_FILE).exists() and not is_owned(folder):
            sweep(folder)
    folder = Path(tempfile.mkdtemp(prefix="", dir=base))
    # In one step: another process that starts now must not take it for left behind.
    part = folder / f"{_OWNER_FILE}.part"
    part.write_text(_identity(os.getpid()) or "", encoding="ascii")
    part.rename(folder / _OWNER_FILE)
    return folder


def base_folder() -> Path:
    """The folder that they are in.

    Raises:
        ClusterError: it is not this user's alone.
    """
    # Short, because Ray puts unix sockets below it, whose paths may have 107 characters.
    base = Path(tempfile.gettempdir()) / f"rlinf-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    info = base.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ClusterError(
            f"`{base}` is not a private folder of yours", help="remove it, or set TMPDIR to a folder of your own"
        )
    return base


def is_owned(folder: Path) -> bool:
    """Whether the process that made the folder lives."""
    try:
        owner = (folder / _OWNER_FILE).read_text(encoding="ascii")
    except OSError:
        return False
    pid = owner.split(":")[0]
    return pid.isdigit() and _identity(int(pid)) == owner


def sweep(folder: Path) -> None:
    """Ends what is left of the embedded Ray of a driver that is gone, and removes the driver's folder."""
    for _ in range(_SWEEPS):
        left = list(_processes_of(folder))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not left:
            break
        # Some start others until they end themselves.
        time.sleep(_SWEEP_PAUSE)
    shutil.rmtree(folder, ignore_errors=True)


def sweep_after(folder: Path, seconds: float) -> None:
    """Waits until the owner of a folder is gone, at most so long, and then sweeps; not at all while it lives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not is_owned(folder):
            sweep(folder)
            return
        time.sleep(_SWEEP_PAUSE)


def _processes_of(folder: Path) -> Iterator[int]:
    mark = b"\0" + f"{MARK}={folder}".encode() + b"\0"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            ours = mark in b"\0" + (entry / "environ").read_bytes()
            if ours and any(name in (entry / "cmdline").read_bytes() for name in _ENGINE):
                yield int(entry.name)
        except OSError:
            continue  # it ended, or is another user's


def _identity(pid: int) -> str | None:
    """`PID:START`, which no later process with the same pid shares; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # One that was killed may wait for its parent to take note of it.
    return None if fields[0] in "ZX" else f"{pid}:{fields[19]}"
