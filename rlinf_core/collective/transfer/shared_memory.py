"""Bodies in shared memory: between processes of one host, one copy in, and a place of a few bytes in the frame."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlinf_core.collective.memory.arena import Arena, ArenaBlock, spill
from rlinf_core.collective.memory.segment import SharedSegment
from rlinf_core.collective.messages.frame import Flag, SharedPlace
from rlinf_core.collective.messages.message import EncodedBody, Message, do_nothing
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError


class SharedMemoryWriter:
    """Writes bodies to the arena. While that is full it waits, and after a while it takes its own segment.

    So a slow receiver throttles its sender, and two senders that wait for each other's room still make progress.

    Args:
        spill_after: seconds to wait for room before memory outside the arena is taken.
        owners: the receivers of the body; each gets its own lease.
    """

    def __init__(self, arena: Arena, spill_after: float, owners: Sequence[str]) -> None:
        self._arena = arena
        self._spill_after = spill_after
        self._owners = owners

    def encode(self, message: Message, work: Work[object] | None) -> EncodedBody | None:
        """Return the message's body in shared memory; wait for room until `work`'s deadline.

        Without `work` it does not wait, and returns None where there is no room.

        Raises:
            CommunicationTimeoutError: no room became free.
        """
        size = message.body_size
        block = self._arena.try_allocate(size, self._owners) if work is None else self.room(size, work)
        if block is None:
            return None
        self.fill(block, message)
        return shared_body(block, 0, lambda: self._arena.cancel(block))

    def fill(self, block: ArenaBlock, message: Message) -> None:
        try:
            message.gather(block.memory())
        except BaseException:
            self._arena.cancel(block)
            raise

    def room(self, size: int, work: Work[object]) -> ArenaBlock:
        """Return a block for a body, with a lease for each owner; waits for room as `encode`."""
        block = self._arena.try_allocate(size, self._owners)
        if block is not None:
            return block
        # Waiting for room is useless where the body can never fit.
        fits = size <= self._arena.capacity
        spill_at = time.monotonic() + (self._spill_after if fits else 0.0)
        while True:
            now = time.monotonic()
            if now >= spill_at:
                block = spill(size, len(self._owners))
                if block is not None:
                    return block
            error = work.exception()
            if error is not None:
                raise error
            if now >= work.deadline:
                raise self._full(size, work)
            self._arena.wait_for_room(min(work.deadline, max(spill_at, now + 0.1)))
            block = self._arena.try_allocate(size, self._owners)
            if block is not None:
                return block

    def _full(self, size: int, work: Work[object]) -> CommunicationTimeoutError:
        use = self._arena.use()
        holders = ", ".join(f"`{name}` {held}" for name, held in sorted(use.holders.items())) or "nobody"
        return CommunicationTimeoutError(
            work.title,
            work.seconds,
            picture=(
                f"no room for {size} bytes: {use.used} of {use.capacity} bytes of shared memory are in use, held by "
                f"{holders}, and the memory limit leaves no room outside of it"
            ),
            help="receive what was sent, drop what is not needed, or raise RLINF_SHM_LIMIT",
        )


def shared_body(block: ArenaBlock, place: int, undo: Callable[[], None] = do_nothing) -> EncodedBody:
    """Return a body for the holder number `place` of a block."""
    segment = block.segment
    where = SharedPlace(segment.identity, block.offset, block.size, block.leases[place])
    flags = Flag.SHARED | Flag.ONE_SHOT if segment.passes_once else Flag.SHARED
    return EncodedBody(flags, where, fds=descriptors(segment), undo=undo)


def descriptors(segment: SharedSegment) -> tuple[int, ...]:
    """Return the descriptors that another process needs: of the memory, and of the event that signals a release."""
    if segment.release_event is None or segment.orphaned:
        return (segment.fd,)
    return (segment.fd, segment.release_event)
