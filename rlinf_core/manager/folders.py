"""The private folders of this user's drivers on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlinf_core.bootstrap.node_facts import private_base
from rlinf_core.bootstrap.node_processes import alive, identity
from rlinf_core.errors import ClusterError
from rlinf_core.manager.orphan_reaper import reap

_OWNER_FILE = "owner"
# A TMPDIR that leaves room for Ray's sockets; in the place of a longer one it is /tmp.
_LONGEST_TMPDIR = 16


def new_folder() -> Path:
    """Return a private folder for this process; those whose owners are gone are removed."""
    base = base_folder()
    for folder in base.iterdir():
        if (folder / _OWNER_FILE).exists() and not is_owned(folder):
            reap(folder)
    folder = Path(tempfile.mkdtemp(prefix="", dir=base))
    # In one step: another process that starts now must not take it for left behind.
    part = folder / f"{_OWNER_FILE}.part"
    part.write_text(identity(os.getpid()) or "", encoding="ascii")
    part.rename(folder / _OWNER_FILE)
    return folder


def base_folder() -> Path:
    """Return the folder that they are in.

    Raises:
        ClusterError: it cannot be made, or is not this user's alone.
    """
    base = Path(private_base())
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        info = base.stat()
    except OSError as error:
        raise ClusterError(
            f"`{base}` cannot be used",
            why=error.strerror,
            help=f"set TMPDIR to a folder of your own with at most {_LONGEST_TMPDIR} characters, for Ray's sockets",
        ) from None
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
    return alive(owner)
