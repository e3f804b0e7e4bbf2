"""How a client on the same host hears of its put, or gets its small item: through memory that it shares with the
channel, without a message.

Who waits for one operation takes a box and names it in the operation's ticket. The channel lays the answer into the box
and then writes the ticket on it. The client looks for that for a moment before it sleeps; when it goes to sleep it
leaves a note, and the channel, which looks for the note after it has written the ticket, then sends a message too.

Ticket and note may pass each other unseen, for a processor may delay a store beyond a later load: so the client looks
once more a little later, when both have long become visible. No other order of loads and stores is relied on than that
of x86, so elsewhere there are no boxes and every answer is a message.
"""

from __future__ import annotations

import platform
import struct
import threading

_BITS = 4
# How far apart tickets are, so that each has room for the number of a box; box 0 means none.
TICKETS = 1 << _BITS
_BOX = TICKETS - 1
_WORDS = 8 * TICKETS
_MAIL = 1024
_HEAD = struct.Struct("<II")
# The largest answer that a box holds, in bytes.
LARGEST = _MAIL - _HEAD.size
SIZE = 2 * _WORDS + TICKETS * _MAIL
# Whether stores become visible in the order in which they are made.
_ORDERED = platform.machine() in ("x86_64", "AMD64")


def box_of(ticket: int) -> int:
    """Return the box that a ticket names; 0: none."""
    return ticket & _BOX


class Boxes:
    """The client's side."""

    def __init__(self, memory: memoryview, *, ordered: bool = _ORDERED) -> None:
        self._tickets = memory[:_WORDS].cast("Q")
        self._notes = memory[_WORDS : 2 * _WORDS].cast("Q")
        self._mail = memory[2 * _WORDS : SIZE]
        self._free = list(range(TICKETS - 1, 0, -1)) if ordered else []
        # Tickets with a box: whether the channel may still answer, and whether its client may still look and note.
        self._open: set[int] = set()
        self._watched: set[int] = set()
        self._lock = threading.Lock()

    def take(self, ticket: int) -> int:
        """Return `ticket` with the number of a box that is now its own, or as it is when none is free.

        It is its own until both `ended` and `left` were called.
        """
        with self._lock:
            if not self._free:
                return ticket  # a message tells its answer
            ticket |= self._free.pop()
            self._open.add(ticket)
            self._watched.add(ticket)
            return ticket

    def ended(self, ticket: int) -> None:
        """The channel will not touch this ticket's box any more; a second time does nothing."""
        self._let_go(ticket, self._open, self._watched)

    def left(self, ticket: int) -> None:
        """Nobody looks into this ticket's box any more, or notes anything there; a second time does nothing."""
        self._let_go(ticket, self._watched, self._open)

    def _let_go(self, ticket: int, of: set[int], other: set[int]) -> None:
        with self._lock:
            if ticket in of:
                of.remove(ticket)
                if ticket not in other:
                    self._free.append(ticket & _BOX)

    def answered(self, ticket: int) -> bool:
        """Return whether the answer is in the box."""
        return self._tickets[ticket & _BOX] == ticket

    def leave_note(self, ticket: int) -> None:
        """From now on a message shall say when the answer is there."""
        self._notes[ticket & _BOX] = ticket

    def mail(self, ticket: int) -> tuple[int, bytes]:
        """Return where to sign for the item, and the item, packed."""
        at = (ticket & _BOX) * _MAIL
        slot, size = _HEAD.unpack_from(self._mail, at)
        at += _HEAD.size
        return slot, bytes(self._mail[at : at + size])


class PostOffice:
    """The channel's side of one client's boxes."""

    def __init__(self, memory: memoryview, since: int = 0) -> None:
        """`since`: the ticket with which the client shared them; an earlier one names a box of those it had before."""
        self._since = since
        self._tickets = memory[:_WORDS].cast("Q")
        self._notes = memory[_WORDS : 2 * _WORDS].cast("Q")
        self._mail = memory[2 * _WORDS : SIZE]

    def has_box(self, ticket: int) -> bool:
        """Return whether a ticket names one of these boxes."""
        return bool(ticket & _BOX) and ticket > self._since

    def deliver(self, ticket: int, slot: int, item: bytes | bytearray) -> bool:
        """Lay in an item, to be signed for at `slot`; tell whether a message must say so.

        Args:
            ticket: of the operation.
            slot: see `Receipts`.
            item: packed, at most `LARGEST` bytes.
        """
        at = (ticket & _BOX) * _MAIL
        _HEAD.pack_into(self._mail, at, slot, len(item))
        at += _HEAD.size
        self._mail[at : at + len(item)] = item
        return self.answer(ticket)

    def answer(self, ticket: int) -> bool:
        """Say that the operation is done; tell whether a message must say so too."""
        box = ticket & _BOX
        self._tickets[box] = ticket
        return self._notes[box] == ticket
