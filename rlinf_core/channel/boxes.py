"""Answers of a channel to a client on the same host, that of a put or a small item: through memory that both share,
without a message.

Who waits for one operation takes a box and names it in the operation's op_id. The channel lays the answer into the box
and then writes the op_id on it. The client looks for that for a moment before it sleeps; when it goes to sleep it
leaves a note, and the channel, which looks for the note after it has written the op_id, then sends a message too.

OpId and note may pass each other unseen, for a processor may delay a store beyond a later load: so the client looks
once more a little later, when both have long become visible. No other order of loads and stores is relied on than that
of x86, so elsewhere there are no boxes and every answer is a message.
"""

from __future__ import annotations

import platform
import struct
import threading

_BITS = 4
# How far apart op_ids are, so that each has room for the number of a box; box 0 means none.
ID_STEP = 1 << _BITS
_BOX = ID_STEP - 1
_WORDS = 8 * ID_STEP
_MAIL = 1024
_HEAD = struct.Struct("<II")
# The largest answer that a box holds, in bytes.
LARGEST = _MAIL - _HEAD.size
SIZE = 2 * _WORDS + ID_STEP * _MAIL
# Whether stores become visible in the order in which they are made.
_ORDERED = platform.machine() in ("x86_64", "AMD64")


def box_of(op_id: int) -> int:
    """Return the box that a op_id names; 0: none."""
    return op_id & _BOX


class AnswerSlots:
    """The client's side."""

    def __init__(self, memory: memoryview, *, ordered: bool = _ORDERED) -> None:
        self._op_ids = memory[:_WORDS].cast("Q")
        self._notes = memory[_WORDS : 2 * _WORDS].cast("Q")
        self._mail = memory[2 * _WORDS : SIZE]
        self._free = list(range(ID_STEP - 1, 0, -1)) if ordered else []
        # Tickets with a box: whether the channel may still answer, and whether its client may still look and note.
        self._open: set[int] = set()
        self._watched: set[int] = set()
        self._lock = threading.Lock()

    def take(self, op_id: int) -> int:
        """Return `op_id` with the number of a box that is now its own, or as it is when none is free.

        It is its own until both `ended` and `left` were called.
        """
        with self._lock:
            if not self._free:
                return op_id  # a message tells its answer
            op_id |= self._free.pop()
            self._open.add(op_id)
            self._watched.add(op_id)
            return op_id

    def ended(self, op_id: int) -> None:
        """Free the box of an operation that the channel will not touch any more; a second time does nothing."""
        self._let_go(op_id, self._open, self._watched)

    def left(self, op_id: int) -> None:
        """Nobody looks into this op_id's box any more, or notes anything there; a second time does nothing."""
        self._let_go(op_id, self._watched, self._open)

    def _let_go(self, op_id: int, of: set[int], other: set[int]) -> None:
        with self._lock:
            if op_id in of:
                of.remove(op_id)
                if op_id not in other:
                    self._free.append(op_id & _BOX)

    def answered(self, op_id: int) -> bool:
        """Return whether the answer is in the box."""
        return self._op_ids[op_id & _BOX] == op_id

    def leave_note(self, op_id: int) -> None:
        """From now on a message shall say when the answer is there."""
        self._notes[op_id & _BOX] = op_id

    def mail(self, op_id: int) -> tuple[int, bytes]:
        """Return where to sign for the item, and the item, packed."""
        at = (op_id & _BOX) * _MAIL
        slot, size = _HEAD.unpack_from(self._mail, at)
        at += _HEAD.size
        return slot, bytes(self._mail[at : at + size])


class AnswerWriter:
    """The channel's side of one client's boxes."""

    def __init__(self, memory: memoryview, since: int = 0) -> None:
        """`since`: the op_id with which the client shared them; an earlier one names a box of those it had before."""
        self._since = since
        self._op_ids = memory[:_WORDS].cast("Q")
        self._notes = memory[_WORDS : 2 * _WORDS].cast("Q")
        self._mail = memory[2 * _WORDS : SIZE]

    def has_box(self, op_id: int) -> bool:
        """Return whether a op_id names one of these boxes."""
        return bool(op_id & _BOX) and op_id > self._since

    def deliver(self, op_id: int, slot: int, item: bytes | bytearray) -> bool:
        """Lay in an item, to be signed for at `slot`; tell whether a message must say so.

        Args:
            op_id: of the operation.
            slot: see `AckReader`.
            item: packed, at most `LARGEST` bytes.
        """
        at = (op_id & _BOX) * _MAIL
        _HEAD.pack_into(self._mail, at, slot, len(item))
        at += _HEAD.size
        self._mail[at : at + len(item)] = item
        return self.answer(op_id)

    def answer(self, op_id: int) -> bool:
        """ReplyKind that the operation is done; tell whether a message must say so too."""
        box = op_id & _BOX
        self._op_ids[box] = op_id
        return self._notes[box] == op_id
