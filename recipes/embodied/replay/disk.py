"""Room on a disk, taken before it is needed: a disk that is full is so told before anything is lost; and its errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from recipes.embodied.replay.replay_types import ReplayError


def take_room(file: int, size: int) -> None:
    """Have the disk keep room for a file of `size` bytes, where it can; a file that is as large stays as it is.

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
    return ReplayError(message, where=str(folder), why=error.strerror or str(error), help=help)
