"""Acknowledgements of a consumer on the same host, by one word of memory that it shares with the channel.

It is written before the items are handed to the caller, costs no message, and can be read when the consumer is dead:
what it had is not given to another one, and what it had not is.
"""

from __future__ import annotations

# Deliveries to one consumer that may be under way with a word of their own.
SLOTS = 512
SIZE = 8 * SLOTS
# Where there is no word: the consumer sends a message.
NO_SLOT = 0xFFFF


class AckWriter:
    """The consumer's side."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:SIZE].cast("Q")

    def sign(self, slot: int, op_id: int) -> None:
        """Acknowledge the items of `op_id`."""
        self._words[slot] = op_id


class AckReader:
    """The channel's side: which deliveries to one consumer are under way, and which of them it has signed for."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:SIZE].cast("Q")
        self._free = list(range(SLOTS))
        self._under_way: list[tuple[int, int]] = []

    def slot(self, op_id: int) -> int:
        """Return where the consumer shall sign for a delivery that begins now."""
        if not self._free:
            return NO_SLOT
        slot = self._free.pop()
        self._under_way.append((slot, op_id))
        return slot

    def signed(self) -> list[int]:
        """Return the deliveries that were signed for since the last call."""
        if not self._under_way:
            return []
        op_ids: list[int] = []
        unsigned: list[tuple[int, int]] = []
        # Each word is read once: it may change at any moment.
        for slot, op_id in self._under_way:
            if self._words[slot] == op_id:
                op_ids.append(op_id)
                self._free.append(slot)
            else:
                unsigned.append((slot, op_id))
        self._under_way = unsigned
        return op_ids

    def drop(self, op_id: int) -> None:
        """Forget a delivery that was taken back: nobody will sign for it."""
        for slot, one in self._under_way:
            if one == op_id:
                self._under_way.remove((slot, op_id))
                self._free.append(slot)
                return
