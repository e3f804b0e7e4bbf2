"""Memory of the host that a process has freed. Imports no torch."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

# Bytes of the largest freed block that is kept: the most that glibc's mallopt(3) takes.
LARGEST_KEPT: Final = 32 * 2**20
# Parameters of mallopt(3).
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1


def keep_freed_memory() -> None:
    """Have this process keep freed blocks of up to 32 MiB for its next ones, instead of giving them to the system.

    Layers that compute on the host, and batches of images, take and free the same megabytes again and again. The system
    clears their pages each time, which costs as much as a tenth of a training step. Without glibc nothing is done.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def release_host_memory() -> None:
    """Give freed memory of this process back to the system.

    The allocator of glibc keeps blocks of up to 32 MiB for later: after a training step that can be as much again as
    the weights. On other systems nothing is done.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
