"""Unanswered requests of a client to its channel: its operations, and its pipelines of asynchronous puts.

A pipeline batches the puts of one key into frames, and bounds the unaccepted ones by a window. It does not depend on
the channel: its owner sends its frames, and reports the accepted puts.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from rlinf_core.channel import wire
from rlinf_core.channel.handle import REAPER
from rlinf_core.channel.operation import ChannelOperation, let_go
from rlinf_core.channel.wire import (
    ID_STEP,
    LARGEST,
    NO_ACK_SLOT,
    ClientMailbox,
    ClosedNotice,
    ReplyHeader,
    ReplyKind,
    RequestKind,
)
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.message import Encoded
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.failures import PackedError
from rlinf_core.process import activity
from rlinf_core.waiting import OperationKind, spin

AnyOperation: TypeAlias = ChannelOperation[Any]
# Seconds after which a store of one processor is certainly visible to all others.
_VISIBLE_AFTER = 1e-3


class Pending:
    """The pending operations of one client by id. The caller that removes one settles it.

    Attributes:
        mailbox: the memory that is shared with the channel, if any.
        closed_notice: the last message of the channel, once it has ended.
        pipelines: the asynchronous puts that are not accepted yet, by key.
        op_ids: an iterator of new operation ids.
    """

    def __init__(self, endpoint: Endpoint, stream: PeerStream) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self.op_ids = itertools.count(ID_STEP, ID_STEP)
        self._open: dict[int, AnyOperation] = {}
        # Operations that were withdrawn and that still await the channel's reply.
        self._withdrawn: dict[int, AnyOperation] = {}
        self.mailbox: ClientMailbox | None = None
        self.closed_notice: ClosedNotice | None = None
        self.pipelines: dict[str, PutPipeline] = {}

    def add(self, operation: AnyOperation, *, detached: bool) -> None:
        """Register an operation for replies; the reaper expires a `detached` one, for which no caller waits."""
        self._open[operation.op_id] = operation
        if detached:
            REAPER.watch(self._open)

    def watch(self, operation: AnyOperation) -> None:
        """Poll the operation's answer slot for a moment, then request a wake-up message."""
        slots, op_id = operation.mailbox, operation.op_id
        if slots is None or operation.settled:
            return
        waits = self._endpoint.waits
        waits.check()
        # With tracing on, do not poll, so that the wait is recorded.
        seconds = self._endpoint.settings.spin if activity.recorder is None else 0.0
        if spin(lambda: slots.answered(op_id), seconds) or slots.answered(op_id):
            waits.operations.publish_past(operation.kind)
            self._unpack(operation)
            return
        slots.request_wakeup(op_id)
        if not slots.answered(op_id):
            operation.wait_until(min(operation.deadline, time.monotonic() + _VISIBLE_AFTER), operation.seconds)
        if slots.answered(op_id):
            self._unpack(operation)

    def withdraw(self, operation: AnyOperation) -> bool:
        """Move an operation to the withdrawn ones; return False if it has ended."""
        op_id = operation.op_id
        if op_id not in self._open:
            return False
        # Added before it is removed from `_open`: a concurrent reply must find it in one of the two.
        self._withdrawn[op_id] = operation
        if self._open.pop(op_id, None) is None:
            self._withdrawn.pop(op_id, None)
            return False
        return True

    def forget(self, operation: AnyOperation) -> None:
        self._open.pop(operation.op_id, None)
        self._withdrawn.pop(operation.op_id, None)

    def take_all(self) -> list[AnyOperation]:
        taken: list[AnyOperation] = []
        for operations in (self._open, self._withdrawn):
            for op_id in operations.copy():
                operation = operations.pop(op_id, None)
                if operation is not None:
                    taken.append(operation)
        return taken

    def fail_all(self, error: Exception) -> None:
        for operation in (*self._open.copy().values(), *self._withdrawn.copy().values()):
            if operation.fail(error):
                # Marks the failure of a put as read: its item may have been accepted, so it is not logged as lost.
                operation.exception()

    # Replies of the broker, in the reading thread

    def reply(self, received: ReceivedMessage) -> None:
        """Handle a reply of the channel."""
        reply = wire.unpack_reply(received.frame.key)
        say, op_id = reply.say, reply.op_id
        head = received.frame.head
        if say == ReplyKind.ACCEPTED:
            self._accepted(wire.unpack_plain(head) if head else (op_id,))
        elif say == ReplyKind.ITEM:
            operation = self._open.pop(op_id, None)
            if operation is not None:
                self._note_size(len(head) <= LARGEST)
                self._taken(operation, reply.ack_slot, (head,))
        elif say == ReplyKind.MAIL:
            operation = self._open.get(op_id)
            if operation is not None:
                self._unpack(operation)
        elif say == ReplyKind.LARGE:
            self._note_size(False)
            self._some(reply, [received])
        elif say == ReplyKind.ITEMS:
            self._some(reply, wire.unpack_plain(head))
        elif say == ReplyKind.ENDED:
            self.closed_notice = wire.unpack(head)
        else:
            operation = self._take(op_id)
            if operation is not None:
                _end(operation, reply, head)
                self._put_ended(cast("str", operation.key), (op_id,))

    def _accepted(self, op_ids: Sequence[int]) -> None:
        ended: dict[str, list[int]] = {}
        for op_id in op_ids:
            operation = self._take(op_id)
            if operation is not None:
                operation.finish(None)
                if self.pipelines:
                    ended.setdefault(cast("str", operation.key), []).append(op_id)
        for key, of_key in ended.items():
            self._put_ended(key, of_key)

    def _put_ended(self, key: str, op_ids: Sequence[int]) -> None:
        pipeline = self.pipelines.get(key)
        if pipeline is not None:
            pipeline.ended(op_ids)

    def _take(self, op_id: int) -> AnyOperation | None:
        operation = self._open.pop(op_id, None)
        return self._withdrawn.pop(op_id, None) if operation is None else operation

    def _some(self, reply: ReplyHeader, pieces: list[bytes] | list[ReceivedMessage]) -> None:
        operation = self._open.get(reply.op_id)
        if operation is None:
            let_go(pieces)  # the operation was withdrawn
        elif operation.add(reply.place, reply.total, pieces):
            if self._open.pop(reply.op_id, None) is None:
                let_go(pieces)
            else:
                self._taken(operation, reply.ack_slot, operation.pieces)

    def _note_size(self, small: bool) -> None:
        if self.mailbox is not None:
            self.mailbox.small = small

    def _unpack(self, operation: AnyOperation) -> None:
        if operation.mailbox is None or self._open.pop(operation.op_id, None) is None:
            return  # the operation was withdrawn, or a message settled it first
        if operation.kind is OperationKind.PUT:
            operation.finish(None)
        else:
            ack_slot, item = operation.mailbox.read_item(operation.op_id)
            self._taken(operation, ack_slot, (item,))

    def _taken(self, operation: AnyOperation, ack_slot: int, pieces: Sequence[object]) -> None:
        """Acknowledge the items, so that they are not redelivered, before their consumer sees them."""
        if not operation.claim():
            # The operation was cancelled just after it was removed here, so the channel does not know that yet.
            let_go(pieces)
            self._endpoint.post(self._stream, wire.REQUESTS, wire.pack_request(RequestKind.CANCEL, operation.op_id))
            return
        self._sign(ack_slot, operation.op_id)
        operation.arrive(pieces)

    def _sign(self, ack_slot: int, op_id: int) -> None:
        mailbox = self.mailbox
        if ack_slot != NO_ACK_SLOT and mailbox is not None:
            mailbox.acknowledge(ack_slot, op_id)
        else:
            self._endpoint.post(self._stream, wire.REQUESTS, wire.pack_request(RequestKind.TAKEN, op_id))


def _end(operation: AnyOperation, reply: ReplyHeader, head: bytes | bytearray) -> None:
    if reply.say == ReplyKind.REFUSED:
        operation.refuse(wire.REASONS[reply.place], head.decode())
    elif reply.say == ReplyKind.FAILED:
        packed: PackedError = wire.unpack(head)
        operation.fail(packed.unpack())
    else:
        operation.arrive((head,))


# The most puts in one frame, and about the most bytes.
_FRAME_PUTS = 256
_FRAME_BYTES = 64 << 10
# The most puts of one key, and about the most bytes, that are sent and not accepted.
_WINDOW_PUTS = 1024
_WINDOW_BYTES = 16 << 20


@dataclass(slots=True)
class QueuedPut:
    """A put that was issued; its item is packed if small, else encoded."""

    operation: ChannelOperation[Any]
    item: bytes | Encoded
    weight: float
    nbytes: int


class PutPipeline:
    """The puts of one process under one key that are not accepted yet: in order, batched, and bounded by a window.

    The first put is sent at once; puts issued before it is accepted wait here and are sent together. So a single put
    has no delay, and a thousand puts take few frames. Puts beyond the window stay with the producer, which bounds what
    a full channel holds of them.

    Args:
        send: sends some small puts in one frame, or one large put; must not block.
        idle: called when no put is left.
    """

    def __init__(self, send: Callable[[Sequence[QueuedPut]], None], idle: Callable[[], None]) -> None:
        self._send = send
        self._idle = idle
        self._lock = threading.Lock()
        self._waiting: deque[QueuedPut] = deque()
        self._sent: dict[int, int] = {}
        self._sent_bytes = 0
        self.closed = False

    def add(self, put: QueuedPut) -> bool:
        """Add a put; return False if the pipeline has ended."""
        with self._lock:
            if self.closed:
                return False
            self._waiting.append(put)
            if not self._sent or len(self._waiting) >= _FRAME_PUTS or put.nbytes >= _FRAME_BYTES:
                self._send_within_window()
            return True

    def flush(self) -> None:
        """Send all waiting puts now, before an operation that must follow them."""
        with self._lock:
            while self._waiting:
                self._send_some()

    def ended(self, op_ids: Sequence[int]) -> None:
        with self._lock:
            for op_id in op_ids:
                self._sent_bytes -= self._sent.pop(op_id, 0)
            self._send_within_window()
            if not self._sent and not self._waiting and not self.closed:
                self.closed = True
                self._idle()

    def drop(self) -> None:
        """Drop all puts: the channel is gone."""
        with self._lock:
            self._waiting.clear()
            self._sent.clear()
            if not self.closed:
                self.closed = True
                self._idle()

    def _send_within_window(self) -> None:
        while self._waiting and (
            not self._sent or (len(self._sent) < _WINDOW_PUTS and self._sent_bytes < _WINDOW_BYTES)
        ):
            self._send_some()

    def _send_some(self) -> None:
        waiting = self._waiting
        run: list[QueuedPut] = []
        size = 0
        while waiting and len(run) < _FRAME_PUTS and size < _FRAME_BYTES:
            large = isinstance(waiting[0].item, Encoded)
            if large and run:
                break
            put = waiting.popleft()
            if put.operation.settled:
                continue  # it was cancelled before it was sent
            run.append(put)
            size += put.nbytes
            self._sent[put.operation.op_id] = put.nbytes
            if large:
                break
        self._sent_bytes += size
        if run:
            self._send(run)
