"""How a consumer on the same host says that it has its items: by one word of memory that it shares with the channel.

It is written before the items are handed to the caller, costs no message, and can be read when the consumer is dead:
what it had is not given to another one, and what it had not is.
"""

from __future__ import annotations

# Deliveries to one consumer that may be under way with a word of their own.
SLOTS = 512
SIZE = 8 * SLOTS
# Where there is no word: the consumer sends a message.
NO_SLOT = 0xFFFF


class ReceiptPage:
    """The consumer's side."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:SIZE].cast("Q")

    def sign(self, slot: int, ticket: int) -> None:
        """The items of `ticket` are here."""
        self._words[slot] = ticket


class Receipts:
    """The channel's side: which deliveries to one consumer are under way, and which of them it has signed for."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:SIZE].cast("Q")
        self._free = list(range(SLOTS))
        self._under_way: list[tuple[int, int]] = []

    def slot(self, ticket: int) -> int:
        """Return where the consumer shall sign for a delivery that begins now."""
        if not self._free:
            return NO_SLOT
        slot = self._free.pop()
        self._under_way.append((slot, ticket))
        return slot

    def signed(self) -> list[int]:
        """Return the deliveries that were signed for since the last call."""
        if not self._under_way:
            return []
        tickets: list[int] = []
        unsigned: list[tuple[int, int]] = []
        # Each word is read once: it may change at any moment.
        for slot, ticket in self._under_way:
            if self._words[slot] == ticket:
                tickets.append(ticket)
                self._free.append(slot)
            else:
                unsigned.append((slot, ticket))
        self._under_way = unsigned
        return tickets

    def drop(self, ticket: int) -> None:
        """A delivery was taken back: nobody will sign for it."""
        for slot, one in self._under_way:
            if one == ticket:
                self._under_way.remove((slot, ticket))
                self._free.append(slot)
                return
