"""The arena: the shared memory that a process sends from, one capped segment that is recycled block by block.

Fresh pages cost ten times as much as recycled ones, so each block is taken from the lowest free offset. The arena
grows by new pages only within the memory budget of the machine and the control group.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from rlinf_core.collective import memory_budget
from rlinf_core.errors import PayloadError
from rlinf_core.waiting import is_readable

# A segment is unnamed shared memory (memfd): a control area, then data. A lease is a receiver's right to use a block.
#
# The sender allocates a block and sends its lease. The receiver releases the block by writing one byte of the control
# area. This takes no message and no lock, so a finalizer may do it, at any moment of garbage collection.


PAGE = mmap.PAGESIZE
# MAP_NORESERVE, which Python names from 3.13 on: hardly any page of the mapping ever becomes private.
NO_RESERVE = 0x4000
_ENTRY = 8
# Flags of a pagemap entry: the page is in memory or swapped out; it still belongs to the file. See the kernel's docs.
_THERE, _OF_THE_FILE = 0xC0, 0x20


def forget_writes(mapping: mmap.mmap, address: int, offset: int, size: int) -> None:
    """Undo the writes to `size` bytes of a private mapping, at `offset` in it and at `address` in memory."""
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
    # The flags are in the highest byte of each entry.
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
    FIRST_MARK = 3  # the lowest mark of a lease that its receiver forwarded, and that outlives the receiver


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
        # Its owner is gone: the segment lives until its blocks are released, and no new block will lie in it.
        self.orphaned = False

    def __del__(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)
            if self._owns_event and self.release_event is not None:
                os.close(self.release_event)

    def private_memory(self) -> mmap.mmap:
        """Return the segment as memory whose changes stay in this process, mapped when first needed."""
        if self._private is None:
            self._private = mmap.mmap(self.fd, self.size, mmap.MAP_PRIVATE | NO_RESERVE)
        return self._private

    def crowded(self) -> bool:
        """Return whether more than half is in use, so that receivers should copy their blocks and release them."""
        capacity, used = _USE.unpack_from(self.memory, 0)
        return used * 2 > capacity

    def publish_use(self, capacity: int, used: int) -> None:
        _USE.pack_into(self.memory, 0, capacity, used)

    def mark(self, lease: int, state: LeaseState) -> None:
        self.memory[FIRST_LEASE + lease] = state

    def release(self, lease: int) -> None:
        """Return a block to its owner. Takes no lock, so it may be called anywhere."""
        self.memory[FIRST_LEASE + lease] = LeaseState.RELEASED
        if self.release_event is not None:
            # Where the counter is full, the owner has been woken already.
            with contextlib.suppress(OSError):
                os.eventfd_write(self.release_event, 1)


class BlockLease:
    """The right to read and write one block, until it is released or its last view dies.

    Attributes:
        released: whether this process has released the block, or left the release to another process.
    """

    __slots__ = ("_pid", "index", "offset", "private", "released", "segment", "size")

    def __init__(self, segment: SharedSegment, offset: int, size: int, index: int, private: bool = False) -> None:
        """`private`: other processes hold the same block; writes must stay in this process."""
        self.segment = segment
        self.offset = offset
        self.size = size
        self.index = index
        self.private = private
        self.released = False
        self._pid = os.getpid()

    def release(self) -> None:
        """Return the block to its owner now; views of it must not be used any more."""
        if not self.released and self._pid == os.getpid():
            self.released = True
            self.segment.release(self.index)

    def forward(self, mark: int) -> None:
        """Leave the release to another process, before that process is notified; `mark` identifies the forwarder."""
        self.released = True
        self.segment.memory[FIRST_LEASE + self.index] = mark

    def keep(self) -> None:
        """Undo `forward`: the other process was not notified."""
        self.segment.mark(self.index, LeaseState.HELD)
        self.released = False

    def forwarded_by(self, mark: int) -> bool:
        return self.segment.memory[FIRST_LEASE + self.index] == mark

    def reclaim(self, mark: int) -> None:
        """Release a lease whose holder has died."""
        if self.forwarded_by(mark):
            self.segment.release(self.index)

    def peek(self) -> memoryview:
        return memoryview(self.segment.memory)[self.offset : self.offset + self.size]

    def view(self) -> memoryview:
        """Return the bytes as memory that may be kept and written: the block is released when its last view dies."""
        memory = self.segment.private_memory() if self.private else self.segment.memory
        block = (ctypes.c_ubyte * self.size).from_buffer(memory, self.offset)
        # The callback may run during garbage collection or in a forked child; `release` takes no lock.
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


_SLICE = 0.1
# The owner of blocks that have not been sent, or stay in this process.
LOCAL = "this process"


@dataclass(slots=True, eq=False)
class ArenaBlock:
    """A block of an arena, or of a segment of its own: whole pages, with one lease for each holder."""

    segment: SharedSegment
    offset: int
    size: int
    leases: tuple[int, ...]
    standing: int = 0

    def memory(self) -> memoryview:
        return memoryview(self.segment.memory)[self.offset : self.offset + self.size]

    def lease(self, place: int = 0, private: bool = False) -> BlockLease:
        return BlockLease(self.segment, self.offset, self.size, self.leases[place], private)


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """The memory use of an arena. Sizes in bytes.

    Attributes:
        committed: bytes of the pages that it has allocated, and keeps.
        holders: bytes in use, by the holder's name.
    """

    capacity: int
    used: int
    committed: int
    holders: dict[str, int] = field(default_factory=dict[str, int])


class Arena:
    """The shared memory of one process, for its outgoing messages and for messages from other hosts.

    Attributes:
        capacity: the most that it may hold, in bytes.
    """

    def __init__(
        self, capacity: int, release_event: int, free_bytes: Callable[[], int] = memory_budget.free_bytes
    ) -> None:
        """`release_event` is a borrowed eventfd that receivers write when they release a block."""
        self.capacity = max(PAGE, capacity & -PAGE)
        self._event = release_event
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(CONTROL_SIZE, self.capacity)]
        self._used = 0
        self._top = CONTROL_SIZE
        # By lease: the block and its holder.
        self._holders: dict[int, tuple[ArenaBlock, str]] = {}
        self._next_lease = 0
        self._gone: dict[str, Callable[[], bool]] = {}
        self._segment: SharedSegment | None = None

    @property
    def segment(self) -> SharedSegment:
        """The segment, created on first use."""
        if self._segment is None:
            self._segment = new_segment(CONTROL_SIZE + self.capacity, os.dup(self._event))
        return self._segment

    def use(self) -> ArenaUse:
        with self._lock:
            self._reap()
            holders: dict[str, int] = {}
            for block, owner in self._holders.values():
                holders[owner] = holders.get(owner, 0) + block.size
            return ArenaUse(self.capacity, self._used, self._top - CONTROL_SIZE, holders)

    def try_allocate(self, size: int, owners: Sequence[str] = (LOCAL,)) -> ArenaBlock | None:
        """Return a block of at least `size` bytes with a lease for each of `owners`; None if there is no room now."""
        size = (max(1, size) + PAGE - 1) & -PAGE
        with self._lock:
            # Reuse released blocks first: fresh pages cost ten times as much.
            self._reap()
            index = self._take(size, len(owners))
            if index is None:
                return None
            offset, leases = index
            block = ArenaBlock(self.segment, offset, size, leases, len(leases))
            for lease, owner in zip(leases, owners, strict=True):
                self._holders[lease] = (block, owner)
                self.segment.mark(lease, LeaseState.HELD)
            self._used += size
            self.segment.publish_use(self.capacity, self._used)
            return block

    def wait_for_room(self, deadline: float) -> None:
        """Wait until a receiver releases a block, `deadline` (monotonic) or a tenth of a second, whichever is first."""
        if is_readable(self._event, min(_SLICE, deadline - time.monotonic())):
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                return  # another thread read it; both try to allocate again

    def cancel(self, block: ArenaBlock, *leases: int) -> None:
        """Free some leases of a block, by default all, whose receivers were never notified."""
        if block.segment is not self._segment:
            return  # a spilled block is freed with its last reference
        with self._lock:
            for lease in leases or block.leases:
                self._free_lease(lease)
            self.segment.publish_use(self.capacity, self._used)

    def owner_lost(self, owner: str, is_dead: Callable[[], bool]) -> None:
        """Free the leases of a disconnected receiver once `is_dead()` is true: a dead process has no views."""
        with self._lock:
            if any(owner == holder for _, holder in self._holders.values()):
                self._gone[owner] = is_dead
            self._reap()

    def _take(self, size: int, leases: int) -> tuple[int, tuple[int, ...]] | None:
        if len(self._holders) + leases > LEASES:
            return None
        for place, (offset, free) in enumerate(self._free):
            if free < size:
                continue
            if not self._commit(offset + size):
                return None
            if free == size:
                del self._free[place]
            else:
                self._free[place] = (offset + size, free - size)
            return offset, tuple(self._take_lease() for _ in range(leases))
        return None

    def _take_lease(self) -> int:
        index = self._next_lease
        holders = self._holders
        while index in holders or self.segment.memory[FIRST_LEASE + index] != LeaseState.FREE:
            index = (index + 1) % LEASES
        self.segment.mark(index, LeaseState.HELD)
        self._next_lease = (index + 1) % LEASES
        return index

    def _commit(self, end: int) -> bool:
        """Allocate the pages up to `end` now: if memory ran out at the first write, the process would be killed."""
        if end <= self._top:
            return True
        if end - self._top > self._free_bytes():
            return False
        try:
            os.posix_fallocate(self.segment.fd, self._top, end - self._top)
        except OSError:
            return False
        self._top = end
        return True

    def _reap(self) -> None:
        memory = self.segment.memory
        position = memory.find(_RELEASED, FIRST_LEASE, CONTROL_SIZE)
        before = self._used
        while position >= 0:
            self._free_lease(position - FIRST_LEASE)
            position = memory.find(_RELEASED, position + 1, CONTROL_SIZE)
        for owner in [owner for owner, is_dead in self._gone.items() if is_dead()]:
            del self._gone[owner]
            held = [lease for lease, (_, holder) in self._holders.items() if holder == owner]
            for lease in held:
                if memory[FIRST_LEASE + lease] == LeaseState.HELD:
                    self._free_lease(lease)
        if self._used != before:
            self.segment.publish_use(self.capacity, self._used)

    def _free_lease(self, lease: int) -> None:
        self.segment.mark(lease, LeaseState.FREE)
        holder = self._holders.pop(lease, None)
        if holder is None:
            return
        block, _ = holder
        block.standing -= 1
        if not block.standing:
            self._used -= block.size
            self._give_back(block.offset, block.size)

    def _give_back(self, offset: int, size: int) -> None:
        free = self._free
        insort(free, (offset, size))
        place = free.index((offset, size))
        if place + 1 < len(free) and free[place][0] + free[place][1] == free[place + 1][0]:
            free[place] = (offset, free[place][1] + free[place + 1][1])
            del free[place + 1]
        if place and free[place - 1][0] + free[place - 1][1] == offset:
            free[place - 1] = (free[place - 1][0], free[place - 1][1] + free[place][1])
            del free[place]


_RELEASED = bytes([LeaseState.RELEASED])


def new_segment(size: int, release_event: int | None) -> SharedSegment:
    """Return a new segment that owns `release_event`. It has no name, so that no file can be left behind.

    Raises:
        PayloadError: the kernel refuses the memory.
    """
    try:
        fd = os.memfd_create("rlinf", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return SharedSegment(fd, secrets.randbits(63), release_event, owns_event=True)
    except OSError as error:
        raise PayloadError(f"no shared memory of {size} bytes", why=str(error)) from error


def spill(size: int, owners: int, free_bytes: Callable[[], int] = memory_budget.free_bytes) -> ArenaBlock | None:
    """Return a block in a new segment, for when the arena stays full; None if there is no memory for it.

    The segment is not recycled: its memory is freed when the last process unmaps it.
    """
    size = (max(1, size) + PAGE - 1) & -PAGE
    if size > free_bytes():
        return None
    segment = new_segment(CONTROL_SIZE + size, None)
    try:
        os.posix_fallocate(segment.fd, 0, CONTROL_SIZE + size)
    except OSError:
        return None
    segment.publish_use(size, 0)
    return ArenaBlock(segment, CONTROL_SIZE, size, tuple(range(owners)), owners)
