"""The private folders of this user's drivers on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlinf_core.errors import ClusterError
from rlinf_core.manager.sweep import sweep

_OWNER_FILE = "owner"


def new_folder() -> Path:
    """Return a private folder for this process; those whose owners are gone are removed."""
    base = base_folder()
    for folder in base.iterdir():
        if (folder / _OWNER_FILE).exists() and not is_owned(folder):
            sweep(folder)
    folder = Path(tempfile.mkdtemp(prefix="", dir=base))
    # In one step: another process that starts now must not take it for left behind.
    part = folder / f"{_OWNER_FILE}.part"
    part.write_text(identity(os.getpid()) or "", encoding="ascii")
    part.rename(folder / _OWNER_FILE)
    return folder


def base_folder() -> Path:
    """Return the folder that they are in.

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
    """Return whether the process that made the folder lives."""
    try:
        owner = (folder / _OWNER_FILE).read_text(encoding="ascii")
    except OSError:
        return False
    pid = owner.split(":")[0]
    return pid.isdigit() and identity(int(pid)) == owner


def identity(pid: int) -> str | None:
    """Return `PID:START` of a process, which no later one with the same pid shares; None when there is no such
    process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # One that was killed may wait for its parent to take note of it.
    return None if fields[0] in "ZX" else f"{pid}:{fields[19]}"
