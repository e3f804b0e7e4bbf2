"""Preallocation of disk space, so that a full disk is reported before data are lost; and disk errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from recipes.embodied.replay.replay_types import ReplayError
from rlinf_core.foreign.write_fault import write_fault


def take_room(file: int, size: int) -> None:
    """Preallocate disk space for a file of `size` bytes where possible; larger files are unchanged.

    Raises:
        OSError: there is no room.
    """
    if os.fstat(file).st_size >= size:
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def disk_error(message: str, folder: Path, error: OSError, help: str) -> ReplayError:
    """Return the error of a folder that cannot be written."""
    return ReplayError(message, where=str(folder), why=write_fault(folder, error), help=help)
