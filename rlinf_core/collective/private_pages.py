"""Tracking of the pages of a copy-on-write mapping that were written to, and resetting it.

Mapping a large block anew for each message costs more than copying it: a page fault for every few pages. So a
segment is mapped once, and after a message only what was written is dropped; the rest still shows the segment.
"""

from __future__ import annotations

import mmap
import os

PAGE = mmap.PAGESIZE
# MAP_NORESERVE, which Python names from 3.13 on: nearly nothing of the mapping will ever be private.
NO_RESERVE = 0x4000
_ENTRY = 8
# In memory or swapped out; and whether it is still the file's. See pagemap in the kernel's documentation.
_THERE, _OF_THE_FILE = 0xC0, 0x20


def forget_writes(mapping: mmap.mmap, address: int, offset: int, size: int) -> None:
    """Make `size` bytes at `offset` of a private mapping, which lie at `address`, show its file again."""
    if _written(address, size):
        mapping.madvise(mmap.MADV_DONTNEED, offset, size)


def _written(address: int, size: int) -> bool:
    """Return whether any page has become the process's own; true where the kernel does not tell."""
    pages = (size + PAGE - 1) // PAGE
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(fd, pages * _ENTRY, address // PAGE * _ENTRY)
        finally:
            os.close(fd)
    except OSError:
        return True
    if len(entries) != pages * _ENTRY:
        return True
    # All that matters is in the highest byte of each entry.
    return any(flags & _THERE and not flags & _OF_THE_FILE for flags in set(entries[_ENTRY - 1 :: _ENTRY]))
