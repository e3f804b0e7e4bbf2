"""The wire protocol of channels: requests of clients and replies of brokers.

Every message is one frame of the data plane. Its `key` holds the header; a small item is packed into its `head`, a
large one is its body, which lies in shared memory if the two processes share it.

An op_id identifies one operation of one client for the client's lifetime.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from rlinf_core.channel.mailbox import NO_ACK_SLOT
from rlinf_core.channel.queue_state import DEFAULT_KEY as DEFAULT_KEY
from rlinf_core.channel.queue_state import KeyStatistics, Reason
from rlinf_core.collective.messages.message import decode
from rlinf_core.collective.messages.payload import Part

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
