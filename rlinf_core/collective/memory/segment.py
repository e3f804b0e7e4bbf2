"""Shared segments, and leases: the right of a receiver to use a block of one.

A segment is memory without a name (memfd): a control area and data. The sender takes a block, hands it to a receiver
with a lease, and the receiver gives it back by writing one byte of the control area. No message and no lock is
needed for that, so it may happen in a finalizer, at any moment of garbage collection.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import weakref
from enum import IntEnum

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
    """Return whether any page was copied on write; True where the kernel does not report it."""
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


CONTROL_SIZE = 32 << 10
_USE = struct.Struct("<QQ")
FIRST_LEASE = 4096
LEASES = CONTROL_SIZE - FIRST_LEASE


class LeaseState(IntEnum):
    """The state of a lease, kept in one byte of its segment."""

    FREE = 0
    HELD = 1
    RELEASED = 2
    FIRST_MARK = 3  # from here on: the receiver passed it on, so its own death is not the end of it


class SharedSegment:
    """A mapped segment. The mapping lives as long as this object or any view of its memory."""

    def __init__(self, fd: int, identity: int, release_event: int | None, *, owns_event: bool = False) -> None:
        """Take over `fd`; `release_event` is an eventfd that wakes the segment's owner, borrowed unless owned."""
        self.identity = identity
        self.fd = fd
        self.release_event = release_event
        self._owns_event = owns_event
        self.size = os.fstat(fd).st_size
        self.memory = mmap.mmap(fd, self.size)
        self._private: mmap.mmap | None = None
        # Its owner is gone: it stays for what lies in it still, and nobody should keep it for what may come.
        self.orphaned = False

    def __del__(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)
            if self._owns_event and self.release_event is not None:
                os.close(self.release_event)

    @property
    def passes_once(self) -> bool:
        """Whether a receiver should not keep it for further messages."""
        return self.release_event is None or self.orphaned

    def private_memory(self) -> mmap.mmap:
        """Return the segment as memory whose changes stay in this process, mapped when first needed."""
        if self._private is None:
            self._private = mmap.mmap(self.fd, self.size, mmap.MAP_PRIVATE | NO_RESERVE)
        return self._private

    def crowded(self) -> bool:
        """Return whether more than half is in use, so that views should not be kept."""
        capacity, used = _USE.unpack_from(self.memory, 0)
        return used * 2 > capacity

    def publish_use(self, capacity: int, used: int) -> None:
        _USE.pack_into(self.memory, 0, capacity, used)

    def mark(self, lease: int, state: LeaseState) -> None:
        self.memory[FIRST_LEASE + lease] = state

    def release(self, lease: int) -> None:
        """Give a block back to its owner. Takes no lock, and may be called anywhere."""
        self.memory[FIRST_LEASE + lease] = LeaseState.RELEASED
        if self.release_event is not None:
            # A full counter means that its owner is awake already.
            with contextlib.suppress(OSError):
                os.eventfd_write(self.release_event, 1)


class BlockLease:
    """The right to read and write one block, until it is released or its last view dies."""

    __slots__ = ("_pid", "_released", "index", "offset", "private", "segment", "size")

    def __init__(self, segment: SharedSegment, offset: int, size: int, index: int, private: bool = False) -> None:
        """`private`: other processes hold the same block; writes must stay in this process."""
        self.segment = segment
        self.offset = offset
        self.size = size
        self.index = index
        self.private = private
        self._released = False
        self._pid = os.getpid()

    def release(self) -> None:
        """Give the block back at once; views of it must not be used any more."""
        if not self._released and self._pid == os.getpid():
            self._released = True
            self.segment.release(self.index)

    @property
    def forwarded(self) -> bool:
        """Whether the duty to release is another process's, or the block was given back."""
        return self._released

    def forward(self, mark: int) -> None:
        """Transfer the release to another process, before it is notified; `mark` names the holder."""
        self._released = True
        self.segment.memory[FIRST_LEASE + self.index] = mark

    def keep(self) -> None:
        """Take the duty back: the other process never heard of it."""
        self.segment.mark(self.index, LeaseState.HELD)
        self._released = False

    def forwarded_by(self, mark: int) -> bool:
        return self.segment.memory[FIRST_LEASE + self.index] == mark

    def reclaim(self, mark: int) -> None:
        """Release a lease whose holder has died."""
        if self.forwarded_by(mark):
            self.segment.release(self.index)

    def peek(self) -> memoryview:
        return memoryview(self.segment.memory)[self.offset : self.offset + self.size]

    def view(self) -> memoryview:
        """Return the bytes, as memory that may be kept and written: the block is given back when its last view dies."""
        memory = self.segment.private_memory() if self.private else self.segment.memory
        block = (ctypes.c_ubyte * self.size).from_buffer(memory, self.offset)
        # The callback runs in the collector or in a forked child as well: it is made for that.
        if self.private:
            finalizer = weakref.finalize(block, self._release_private, memory, ctypes.addressof(block))
        else:
            finalizer = weakref.finalize(block, self.release)
        finalizer.atexit = False
        return memoryview(block).cast("B")

    def _release_private(self, memory: mmap.mmap, address: int) -> None:
        if self._pid == os.getpid():
            forget_writes(memory, address, self.offset, self.size)
            self.release()
