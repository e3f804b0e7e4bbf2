"""Leases of other processes' memory that were passed on: who answers for them when their new holder dies.

The holder gives a block back straight to its owner, by the lease's byte. Until then the byte shows the mark of who
passed it on, and so long as it does, the death of the holder is ours to notice.
"""

from __future__ import annotations

import random
import threading

from rlinf_core.collective.connection import Connection
from rlinf_core.collective.segment import BlockLease, LeaseState

# Released leases are forgotten whenever about this many have come together.
_SWEEP_AT = 4096


class ForwardedLeases:
    """Leases that this process passed on and has not heard of again.

    Attributes:
        mark: what the bytes of these leases show, so that no other's are taken back.
    """

    def __init__(self) -> None:
        self.mark = random.randint(LeaseState.FIRST_MARK, 255)
        self._lock = threading.Lock()
        # By segment and index, for these are used again: whoever was passed one last holds it.
        self._held: dict[tuple[int, int], tuple[BlockLease, Connection]] = {}
        self._departed: set[Connection] = set()
        self._sweep_at = _SWEEP_AT

    def remember(self, lease: BlockLease, connection: Connection) -> None:
        """Remember that the other side of a connection holds a lease from now on."""
        with self._lock:
            self._held[lease.segment.identity, lease.index] = (lease, connection)
            if connection.closed:
                self._departed.add(connection)
            if len(self._held) >= self._sweep_at:
                self._sweep()

    def lost(self, connection: Connection) -> None:
        """Give back what the other side of an ended connection holds, once that process is dead."""
        with self._lock:
            self._departed.add(connection)
        self.collect()

    def collect(self) -> None:
        """Give back what processes held that are dead by now; one that merely left may still use it."""
        with self._lock:
            # What was given back needs no memory of its owner any more.
            self._sweep()
            if not self._departed:
                return
            left = {connection for _, connection in self._held.values()}
            dead = {one for one in self._departed if one.process.is_dead()}
            for lease, holder in self._held.values():
                if holder in dead:
                    lease.reclaim(self.mark)
            self._held = {key: held for key, held in self._held.items() if held[1] not in dead}
            self._departed = (self._departed & left) - dead

    def outstanding(self) -> bool:
        """Return whether somebody still holds what was passed on."""
        with self._lock:
            self._sweep()
            return bool(self._held)

    def _sweep(self) -> None:
        self._held = {key: held for key, held in self._held.items() if held[0].forwarded_by(self.mark)}
        self._sweep_at = 2 * len(self._held) + _SWEEP_AT
