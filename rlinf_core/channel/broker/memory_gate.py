"""The memory gate: holds producers of an unbounded channel back before the machine runs out of memory."""

from __future__ import annotations

from collections.abc import Callable

from rlinf_core.collective.memory import memory_budget

MIB = 1 << 20
# The memory of the machine is looked at whenever the channel has grown or shrunk by this much.
_STEP = 4 * MIB
_LEAST_RESERVE, _LARGEST_RESERVE = 128 * MIB, 2048 * MIB


def default_reserve() -> int:
    """Return an eighth of the memory that this process is allowed, at most 2 GiB, in bytes."""
    return min(_LARGEST_RESERVE, max(_LEAST_RESERVE, memory_budget.allowed_bytes() // 8))


class MemoryGate:
    """A gate that is closed while less than a reserve is free, and open again once there is a quarter more.

    Attributes:
        held: bytes that the channel holds in this process's own memory; shared memory is its sender's business.
    """

    def __init__(self, free_bytes: Callable[[], int] = memory_budget.free_bytes, reserve: int | None = None) -> None:
        self._free_bytes = free_bytes
        self._reserve = default_reserve() if reserve is None else reserve
        self._looked_at = 0
        self.closed = False
        self.held = 0

    def add(self, nbytes: int) -> bool:
        """Add to the bytes that the channel holds; return whether the gate moved."""
        self.held += nbytes
        return abs(self.held - self._looked_at) >= _STEP and self.look()

    def look(self) -> bool:
        """Check the free memory; return whether the gate moved."""
        self._looked_at = self.held
        before = self.closed
        free = self._free_bytes()
        # A channel that holds nothing cannot make room by waiting.
        self.closed = self.held > 0 and free < (self._reserve * 5 // 4 if before else self._reserve)
        return self.closed != before
