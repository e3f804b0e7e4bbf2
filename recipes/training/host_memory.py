"""Freed host memory of a process: kept for reuse, or returned to the system. Imports no torch."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

# The largest freed block that is kept, in bytes: the maximum of glibc's mallopt(3).
_LARGEST_KEPT: Final = 32 * 2**20
# Parameters of mallopt(3).
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1


def keep_freed_memory() -> None:
    """Have this process keep freed blocks of up to 32 MiB for reuse, instead of returning them to the system.

    Layers that compute on the host, and batches of images, allocate and free the same megabytes again and again. The
    system clears their pages each time, which costs up to a tenth of a training step. Without glibc nothing is done.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def release_host_memory() -> None:
    """Return freed memory of this process to the system.

    glibc's allocator keeps freed blocks of up to 32 MiB: after a training step these can take as much as the weights.
    Without glibc nothing is done.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
