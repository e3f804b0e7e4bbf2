"""The wire protocol of channels: the requests of clients and replies of brokers, as messages or by a mailbox.

Every message is one frame of the data plane. Its `key` holds the header; a small item is packed into its `head`, a
large one is its body, which lies in shared memory if the two processes share it. An op_id identifies one operation of
one client for the client's lifetime.

A client and a channel on the same host also share a mailbox, so that small operations need no message:

* Answer slots. A client that waits for one operation reserves a slot and encodes its number in the operation's id. The
  channel writes the answer into the slot, and then the id. The client polls for the id for a moment. Before it sleeps,
  it requests a wake-up in the slot; the channel checks for a request after it has written the id, and if there is one
  sends a message as well.
* Ack words. A consumer acknowledges a delivery by writing its operation's id into a word, before its caller sees the
  items. The word can be read after the consumer's death: an acknowledged item is not redelivered, any other is.

The id and the wake-up request may miss each other, since a processor may delay a store past a later load. So the
client checks again a little later, when both are certainly visible. Beyond that, the protocol relies on the memory
order of x86; on other processors there are no answer slots, and every answer is a message.
"""

from __future__ import annotations

import io
import pickle
import platform
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from rlinf_core.channel.queue_state import DEFAULT_KEY as DEFAULT_KEY
from rlinf_core.channel.queue_state import KeyStatistics, Reason
from rlinf_core.collective.frame import Part
from rlinf_core.collective.message import decode

_BITS = 4
# The step between operation ids, which leaves their low bits for the number of a slot; slot 0 means none.
ID_STEP = 1 << _BITS
_SLOT = ID_STEP - 1
_WORDS = 8 * ID_STEP
_ITEM = 1024
_HEAD = struct.Struct("<II")
# The largest item that a slot holds, in bytes.
LARGEST = _ITEM - _HEAD.size
_SLOTS_SIZE = 2 * _WORDS + ID_STEP * _ITEM
# Whether stores become visible in the order in which they are made.
_ORDERED = platform.machine() in ("x86_64", "AMD64")

# The most unacknowledged deliveries to one consumer that have an ack word.
ACK_SLOTS = 512
_ACKS_SIZE = 8 * ACK_SLOTS
# Stands for a delivery without an ack word, which its consumer acknowledges by a message.
NO_ACK_SLOT = 0xFFFF
SIZE = _ACKS_SIZE + _SLOTS_SIZE


def slot_of(op_id: int) -> int:
    """Return the number of the slot in an operation's id; 0 means none."""
    return op_id & _SLOT


class ClientMailbox:
    """The client's side of a mailbox.

    Attributes:
        small: whether the last item fitted into a slot; predicts the next one.
    """

    def __init__(self, memory: memoryview, *, ordered: bool = _ORDERED) -> None:
        self._acks, self._ids, self._wakeups, self._items = _areas(memory)
        self._free = list(range(ID_STEP - 1, 0, -1)) if ordered else []
        # Ids of operations whose slot the channel may still write, or the client may still read.
        self._writable: set[int] = set()
        self._readable: set[int] = set()
        self._lock = threading.Lock()
        self.small = True

    def reserve(self, op_id: int) -> int:
        """Return `op_id` with the number of a slot reserved for it, or unchanged if none is free.

        The slot is free again once both `channel_done` and `client_done` were called.
        """
        with self._lock:
            if not self._free:
                return op_id  # the answer will be a message
            op_id |= self._free.pop()
            self._writable.add(op_id)
            self._readable.add(op_id)
            return op_id

    def channel_done(self, op_id: int) -> None:
        """Record that the channel will no longer write this operation's slot; idempotent."""
        self._release(op_id, self._writable, self._readable)

    def client_done(self, op_id: int) -> None:
        """Record that the client will no longer read this operation's slot; idempotent."""
        self._release(op_id, self._readable, self._writable)

    def _release(self, op_id: int, held: set[int], other: set[int]) -> None:
        with self._lock:
            if op_id in held:
                held.remove(op_id)
                if op_id not in other:
                    self._free.append(op_id & _SLOT)

    def answered(self, op_id: int) -> bool:
        return self._ids[op_id & _SLOT] == op_id

    def request_wakeup(self, op_id: int) -> None:
        """Ask the channel to send a message as well once it has answered."""
        self._wakeups[op_id & _SLOT] = op_id

    def read_item(self, op_id: int) -> tuple[int, bytes]:
        """Return the ack slot of the delivery, and its packed item."""
        at = (op_id & _SLOT) * _ITEM
        ack_slot, size = _HEAD.unpack_from(self._items, at)
        at += _HEAD.size
        return ack_slot, bytes(self._items[at : at + size])

    def acknowledge(self, ack_slot: int, op_id: int) -> None:
        """Acknowledge the delivery of an operation."""
        self._acks[ack_slot] = op_id


class BrokerMailbox:
    """The channel's side of one client's mailbox."""

    def __init__(self, memory: memoryview, since: int = 0) -> None:
        """`since`: the operation that shared the memory; slots of earlier operations are in an older mailbox."""
        self._since = since
        self._acks, self._ids, self._wakeups, self._items = _areas(memory)
        self._free_acks = list(range(ACK_SLOTS))
        self._pending_acks: list[tuple[int, int]] = []

    def has_slot(self, op_id: int) -> bool:
        return bool(op_id & _SLOT) and op_id > self._since

    def write_item(self, op_id: int, ack_slot: int, item: bytes | bytearray) -> bool:
        """Answer with a packed item of at most `LARGEST` bytes; return whether a message must wake the client."""
        at = (op_id & _SLOT) * _ITEM
        _HEAD.pack_into(self._items, at, ack_slot, len(item))
        at += _HEAD.size
        self._items[at : at + len(item)] = item
        return self.write_answer(op_id)

    def write_answer(self, op_id: int) -> bool:
        """Write that the operation is done; return whether a message must wake the client."""
        slot = op_id & _SLOT
        self._ids[slot] = op_id
        return self._wakeups[slot] == op_id

    def reserve_ack(self, op_id: int) -> int:
        """Return an ack slot for a new delivery, or NO_ACK_SLOT if none is free."""
        if not self._free_acks:
            return NO_ACK_SLOT
        ack_slot = self._free_acks.pop()
        self._pending_acks.append((ack_slot, op_id))
        return ack_slot

    def collect_acks(self) -> list[int]:
        """Return the operations whose deliveries were acknowledged since the last call."""
        if not self._pending_acks:
            return []
        acknowledged: list[int] = []
        pending: list[tuple[int, int]] = []
        # Read each word only once: it may change at any moment.
        for ack_slot, op_id in self._pending_acks:
            if self._acks[ack_slot] == op_id:
                acknowledged.append(op_id)
                self._free_acks.append(ack_slot)
            else:
                pending.append((ack_slot, op_id))
        self._pending_acks = pending
        return acknowledged

    def drop_ack(self, op_id: int) -> None:
        """Free the ack slot of a delivery that was taken back."""
        for ack_slot, delivery in self._pending_acks:
            if delivery == op_id:
                self._pending_acks.remove((ack_slot, op_id))
                self._free_acks.append(ack_slot)
                return


def _areas(memory: memoryview) -> tuple[memoryview, memoryview, memoryview, memoryview]:
    """Return four views: the ack words, and the ids, wake-up requests and items of the answer slots."""
    slots = memory[_ACKS_SIZE:SIZE]
    words = slots[: 2 * _WORDS].cast("Q")
    return memory[:_ACKS_SIZE].cast("Q"), words[:ID_STEP], words[ID_STEP:], slots[2 * _WORDS :]


# The endpoint's services: tags of its messages.
REQUESTS = 1
REPLIES = 2
# The size in bytes up to which an item is packed; a larger one is a separate message.
SMALL = 32 << 10
REASONS = tuple(Reason)
_REQUEST = struct.Struct("<BBQ")
_REQUEST_SIZE = _REQUEST.size
_REPLY = struct.Struct("<BQIIH")
_BARE, _WITH_PARTS = b"\0", b"\1"


class RequestKind(IntEnum):
    """The kind of a request."""

    HELLO = 1  # body: the mailbox, on the same host; the reply is WELCOME
    PUT = 2  # head: a packed item, or the body is the item; weight: the weight of the item
    PUT_MANY = 3  # head: op_ids, weights and packed items
    ANNOUNCE = 4  # the put of this op_id is in transit
    GET = 5  # weight: the weight of the batch, or 0 for one item
    TAKEN = 6  # acknowledges the items of this op_id, which had no ack slot
    CANCEL = 7  # cancels the operation of this op_id
    CLOSE = 8
    QUERY = 9  # weight: the `Query`


class ReplyKind(IntEnum):
    """The kind of a reply."""

    WELCOME = 1  # head: the number of items that each key may hold, pickled
    ACCEPTED = 2  # head: the op_ids of puts if there are several
    ITEM = 3  # head: the one item, packed
    ITEMS = 4  # head: several packed items
    LARGE = 5  # the body is an item
    REFUSED = 6  # place: the reason, head: why
    ANSWER = 7  # head: a pickled answer
    FAILED = 8  # head: a pickled exception
    ENDED = 9  # head: a pickled `ClosedNotice`
    MAIL = 10  # the one item is in the operation's answer slot


class Query(IntEnum):
    """A question about a channel."""

    DEPTH = 1
    FULL = 2
    PEEK = 3  # the reply holds the items
    STATISTICS = 4
    LOSSES = 5


@dataclass(frozen=True, slots=True)
class ClosedNotice:
    """The last message of a closed and drained channel, whose process ends."""

    statistics: dict[str, KeyStatistics]
    losses: list[object]


class RequestHeader(NamedTuple):
    """The header of a request, in the key of its frame: the operation, and whether it may wait."""

    ask: int
    wait: bool
    op_id: int
    key: str


class ReplyHeader(NamedTuple):
    """The header of a reply, in the key of its frame.

    Attributes:
        say: the kind of the reply.
        place: the index, among the items of the operation, of the first item in the frame; for REFUSED the index of
            the reason.
        total: the number of items of the operation.
        ack_slot: the slot in which to acknowledge them, or NO_ACK_SLOT.
    """

    say: int
    op_id: int
    place: int
    total: int
    ack_slot: int


def pack_request(ask: int, op_id: int, key: bytes = b"", wait: bool = True) -> bytes:
    return _REQUEST.pack(ask, wait, op_id) + key


def unpack_request(data: bytes) -> RequestHeader:
    ask, wait, op_id = _REQUEST.unpack_from(data)
    return RequestHeader(ask, wait == 1, op_id, data[_REQUEST_SIZE:].decode())


def pack_reply(say: int, op_id: int, place: int = 0, total: int = 1, ack_slot: int = NO_ACK_SLOT) -> bytes:
    return _REPLY.pack(say, op_id, place, total, ack_slot)


def unpack_reply(data: bytes) -> ReplyHeader:
    return ReplyHeader(*_REPLY.unpack(data))


def pack(value: object) -> bytes:
    """Return the head of a message between a broker and a client: pickled numbers, packed items, answers or errors."""
    return pickle.dumps(value, protocol=5)


def unpack(data: bytes | bytearray | memoryview) -> Any:
    return pickle.loads(data)  # noqa: S301 - the peer is authenticated


class _PlainData(pickle.Unpickler):
    """An unpickler of plain data, with which a broker unpickles requests without running code of its clients."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"`{module_name}.{global_name}` is no plain data")


def unpack_plain(data: bytes | bytearray) -> Any:
    """Return the plain data that `pack` packed: numbers, texts, bytes and containers of these.

    Raises:
        pickle.UnpicklingError: the data holds other objects.
    """
    return _PlainData(io.BytesIO(data)).load()


def pack_item(head: bytes, parts: Sequence[Part]) -> bytes:
    """Return a packed item: its pickle stream, or a pickle of that stream and copies of the item's parts."""
    if not parts:
        return _BARE + head
    copies: list[bytearray] = []
    for part in parts:
        view = part.view()
        if view is None:
            copy = bytearray(part.nbytes)
            part.copy_into(memoryview(copy))
        else:
            copy = bytearray(view)
        copies.append(copy)
    return _WITH_PARTS + pack((head, copies))


def unpack_item(data: bytes | bytearray) -> object:
    """Return the object that was packed; its arrays and tensors own their memory."""
    packed = memoryview(data)[1:]
    if data[:1] == _BARE:
        return decode(packed, ())
    head, copies = unpack(packed)
    return decode(head, copies)
