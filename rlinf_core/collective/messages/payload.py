"""Parts: the bytes of an object that travel beside its pickle stream."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod

_CHUNK = 1 << 20
# Larger, since other threads run during an unlocked copy, and retaking the interpreter's lock may take milliseconds.
_UNLOCKED_CHUNK = 64 << 20
_HUGE_PAGE = 2 << 20


class Part(ABC):
    """Bytes that are sent beside the pickle stream."""

    nbytes: int

    @abstractmethod
    def view(self) -> memoryview | None:
        """Return the bytes without a copy, or None if they are not contiguous in host memory."""

    @abstractmethod
    def copy_into(self, target: memoryview) -> None:
        """Write the bytes to `target`, which has exactly `nbytes`."""


class HostPart(Part):
    """Contiguous bytes in this process's memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.nbytes = data.nbytes

    def view(self) -> memoryview:
        return self._data

    def copy_into(self, target: memoryview) -> None:
        copy_bytes(target, self._data)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy flat bytes while other threads of this process run.

    Writable memory is copied by ctypes without the interpreter's lock. ctypes gives no address for read-only memory,
    which is copied in pieces so that other threads run in between.
    """
    size = source.nbytes
    if size <= _CHUNK:
        target[:size] = source
    elif source.readonly:
        for start in range(0, size, _CHUNK):
            target[start : start + _CHUNK] = source[start : start + _CHUNK]
    else:
        # `from_buffer` raises if `target` is too small, as a slice assignment does.
        there, here = ((ctypes.c_char * size).from_buffer(view) for view in (target, source))
        for start in range(0, size, _UNLOCKED_CHUNK):
            length = min(_UNLOCKED_CHUNK, size - start)
            ctypes.memmove(ctypes.addressof(there) + start, ctypes.addressof(here) + start, length)


def private_memory(size: int) -> memoryview:
    """Return fresh writable memory of this process."""
    if size < _HUGE_PAGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
