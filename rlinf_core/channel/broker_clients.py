"""The clients of a broker, and the replies that it sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlinf_core.channel import wire
from rlinf_core.channel.operation import Key
from rlinf_core.channel.queue_state import QueuedItem
from rlinf_core.channel.wire import BrokerMailbox, ReplyKind
from rlinf_core.collective import memory_budget
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.message import Message
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.collective.work import Work
from rlinf_core.waiting import OperationKind

# The most losses, dead producers, and cancelled operations of one client that the broker remembers.
REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class LostItem:
    """An item that was in transit to a channel, under this key, when its producer died."""

    producer: str
    key: Key


# A packed item, or a large one where it arrived.
Payload: TypeAlias = bytes | bytearray | ReceivedMessage
# A frame of packed items is sent when it has grown to this size.
_FRAME = 256 << 10


class BrokerClient:
    """A client of the broker: one incarnation of a process that uses the channel."""

    __slots__ = (
        "_endpoint",
        "_unwatched",
        "cancelled",
        "consumes",
        "incarnation",
        "mailbox",
        "name",
        "produces",
        "stream",
    )

    def __init__(self, endpoint: Endpoint, stream: PeerStream, incarnation: str | None) -> None:
        self.name = stream.peer
        self.incarnation = incarnation
        self.stream = stream
        self.produces = False
        self.consumes = False
        self.cancelled: deque[int] = deque(maxlen=REMEMBERED)
        self.mailbox: BrokerMailbox | None = None
        self._endpoint = endpoint
        # No thread waits until a reply is sent; a lost peer is reported by other means.
        self._unwatched: Work[object] = Work(OperationKind.SEND, "client", 1e9)
        self._unwatched.finish(None)

    def reply(self, key: bytes, head: bytes | bytearray = b"") -> None:
        # Only to this incarnation: a successor numbers its operations from the start.
        to = self.incarnation
        if not self._endpoint.post(self.stream, wire.REPLIES, key, head, to=to):
            message = Message(bytes(head), tag=wire.REPLIES, key=key, to=to)
            self._endpoint.send_async(self.stream, message, self._unwatched)

    def send_items(
        self,
        op_id: int,
        items: Sequence[QueuedItem[Payload]],
        ack_slot: int,
        lend: bool,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Send the items of one operation: packed ones together, large ones without a copy where possible.

        The consumer acknowledges them at `ack_slot`. `failed` is called, in any thread, if a large one could not be
        sent.
        """
        count = len(items)
        if count == 1 and not isinstance(items[0].payload, ReceivedMessage):
            self.reply(wire.pack_reply(ReplyKind.ITEM, op_id, 0, 1, ack_slot), items[0].payload)
            return
        if not count:
            self.reply(wire.pack_reply(ReplyKind.ITEMS, op_id, 0, 0), wire.pack(()))
            return
        run: list[bytes | bytearray] = []
        size = 0
        for index, item in enumerate(items):
            payload = item.payload
            if isinstance(payload, ReceivedMessage):
                self._flush(op_id, ack_slot, index, count, run)
                size = 0
                key = wire.pack_reply(ReplyKind.LARGE, op_id, index, count, ack_slot)
                self._forward(key, payload, lend, failed)
                continue
            run.append(payload)
            size += len(payload)
            if size >= _FRAME:
                self._flush(op_id, ack_slot, index + 1, count, run)
                size = 0
        self._flush(op_id, ack_slot, count, count, run)

    def _flush(self, op_id: int, ack_slot: int, end: int, count: int, run: list[bytes | bytearray]) -> None:
        """Send the packed items of `run`, the last of which is just before place `end`."""
        if run:
            self.reply(wire.pack_reply(ReplyKind.ITEMS, op_id, end - len(run), count, ack_slot), wire.pack(run))
            run.clear()

    def _forward(
        self, key: bytes, received: ReceivedMessage, lend: bool, failed: Callable[[BaseException], None]
    ) -> None:
        work = self._endpoint.work(OperationKind.SEND, self.name)

        def check() -> None:
            error = work.exception()
            if error is not None:
                failed(error)

        work.add_done_callback(check)
        self._endpoint.forward(self.stream, received, work, tag=wire.REPLIES, key=key, lend=lend, to=self.incarnation)


# An op_id is unique only within its client.
ClientOpId: TypeAlias = tuple[BrokerClient, int]


# The memory gate: blocks the producers of a channel before the machine runs out of memory.


MIB = 1 << 20
# The free memory of the machine is checked whenever the channel has grown or shrunk by this much.
_STEP = 4 * MIB
_LEAST_RESERVE, _LARGEST_RESERVE = 128 * MIB, 2048 * MIB


def default_reserve() -> int:
    """Return an eighth of the memory that this process is allowed, from 128 MiB to 2 GiB, in bytes."""
    return min(_LARGEST_RESERVE, max(_LEAST_RESERVE, memory_budget.allowed_bytes() // 8))


class MemoryGate:
    """A gate that closes while less than a reserve of memory is free, and reopens at a quarter more than that.

    Attributes:
        held: bytes that the channel holds in this process's private memory; shared memory counts for its sender.
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
        # If the channel holds nothing, waiting frees no memory.
        self.closed = self.held > 0 and free < (self._reserve * 5 // 4 if before else self._reserve)
        return self.closed != before
