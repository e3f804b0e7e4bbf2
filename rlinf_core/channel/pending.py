"""Operations of this process that channels have not answered yet."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from rlinf_core import spans
from rlinf_core.channel import wire
from rlinf_core.channel.boxes import ID_STEP, LARGEST
from rlinf_core.channel.deadlines import Deadlines
from rlinf_core.channel.operation import ChannelOperation, let_go
from rlinf_core.channel.page import ClientMailbox
from rlinf_core.channel.put_pipeline import PutPipeline
from rlinf_core.channel.receipts import NO_SLOT
from rlinf_core.channel.wire import ClosedNotice, ReplyHeader, ReplyKind, RequestKind
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.peer_stream import PeerStream
from rlinf_core.collective.received_message import ReceivedMessage
from rlinf_core.collective.receiver import ServiceMessage
from rlinf_core.collective.spin import spin
from rlinf_core.failures import PackedError
from rlinf_core.waiting import OperationKind

AnyOperation: TypeAlias = ChannelOperation[Any]
# Long after this, what one processor has stored is seen by all others.
_VISIBLE_AFTER = 1e-3


class Pending:
    """The operations that go on, by op_id. Whoever takes one out settles it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._op_ids = itertools.count(ID_STEP, ID_STEP)
        self._open: dict[int, AnyOperation] = {}
        # What the other side was told to end, and has not said what became of.
        self._withdrawn: dict[int, AnyOperation] = {}
        # The memory that is shared with the channel at the other end of a stream.
        self.pages: dict[PeerStream, ClientMailbox] = {}
        # The last words of channels that have ended.
        self.closed_notices: dict[PeerStream, ClosedNotice] = {}
        self._deadlines = Deadlines(lambda: self._open)
        endpoint.serve(wire.REPLIES, self._reply)
        endpoint.on_close(self._fail_all)

    def next_op_id(self) -> int:
        return next(self._op_ids)

    def add(self, operation: AnyOperation, *, detached: bool) -> None:
        """Wait for replies to a operation; one that is `detached` ends at its deadline although nobody waits for it."""
        self._open[operation.op_id] = operation
        if detached:
            self._deadlines.watch()

    def watch(self, stream: PeerStream, operation: AnyOperation) -> None:
        """Look into the operation's box for a moment; afterwards its answer is announced by a message."""
        boxes, op_id = operation.boxes, operation.op_id
        if boxes is None or operation.settled:
            return
        board = self._endpoint.waits
        board.check()
        # What is traced is waited for as everything is.
        seconds = self._endpoint.settings.spin if spans.recorder is None else 0.0
        if spin(lambda: boxes.answered(op_id), time.monotonic() + seconds) or boxes.answered(op_id):
            board.operations.passed(operation.kind)
            self._unpack(stream, operation)
            return
        boxes.leave_note(op_id)
        if not boxes.answered(op_id):
            operation.wait_until(min(operation.deadline, time.monotonic() + _VISIBLE_AFTER), operation.seconds)
        if boxes.answered(op_id):
            self._unpack(stream, operation)

    def withdraw(self, operation: AnyOperation) -> bool:
        """Take an operation out that shall end; False when it has ended."""
        op_id = operation.op_id
        if op_id not in self._open:
            return False
        # Before it leaves the other: who hears of it at this very moment must find it in one of them.
        self._withdrawn[op_id] = operation
        if self._open.pop(op_id, None) is None:
            self._withdrawn.pop(op_id, None)
            return False
        return True

    def forget(self, operation: AnyOperation) -> None:
        """Forget an operation that the other side was never told of, or its end."""
        self._open.pop(operation.op_id, None)
        self._withdrawn.pop(operation.op_id, None)

    def take_all(self, channel: str) -> list[AnyOperation]:
        """Take out what goes on with one channel."""
        taken: list[AnyOperation] = []
        for operations in (self._open, self._withdrawn):
            for op_id, operation in operations.copy().items():
                if operation.target == channel and operations.pop(op_id, None) is not None:
                    taken.append(operation)
        return taken

    def _fail_all(self, error: Exception) -> None:
        """Fail what is pending: this process hears of channels no more."""
        for operations in (self._open, self._withdrawn):
            for operation in operations.copy().values():
                if operation.fail(error):
                    # Seen: a put may have been accepted, so nobody is told that its item is lost.
                    operation.exception()

    # What brokers say; in the thread that reads

    def _reply(self, delivery: ServiceMessage) -> None:
        reply = wire.unpack_reply(delivery.key)
        say, op_id = reply.say, reply.op_id
        head = delivery.received.frame.head
        if say == ReplyKind.ACCEPTED:
            self._accepted(wire.unpack_op_ids(head) if head else (op_id,))
        elif say == ReplyKind.ITEM:
            operation = self._open.pop(op_id, None)
            if operation is not None:
                self._note_size(delivery.stream, len(head) <= LARGEST)
                self._taken(delivery.stream, operation, reply.slot, (head,))
        elif say == ReplyKind.MAIL:
            operation = self._open.get(op_id)
            if operation is not None:
                self._unpack(delivery.stream, operation)
        elif say == ReplyKind.LARGE:
            self._note_size(delivery.stream, False)
            self._some(delivery, reply, [delivery.received])
        elif say == ReplyKind.ITEMS:
            self._some(delivery, reply, wire.unpack_items(head))
        elif say == ReplyKind.ENDED:
            self.closed_notices[delivery.stream] = cast("ClosedNotice", pickle.loads(head))  # noqa: S301 - the peer is authenticated
        else:
            operation = self._take(op_id)
            if operation is not None:
                _end(operation, reply, head)

    def _accepted(self, op_ids: tuple[int, ...]) -> None:
        pipelines: dict[PutPipeline, list[int]] = {}
        for op_id in op_ids:
            operation = self._take(op_id)
            if operation is not None:
                operation.finish(None)
                pipeline = operation.pipeline
                if pipeline is not None:
                    pipelines.setdefault(pipeline, []).append(op_id)
        for pipeline, ended in pipelines.items():
            pipeline.ended(ended)

    def _take(self, op_id: int) -> AnyOperation | None:
        operation = self._open.pop(op_id, None)
        return self._withdrawn.pop(op_id, None) if operation is None else operation

    def _some(self, delivery: ServiceMessage, reply: ReplyHeader, pieces: list[bytes] | list[ReceivedMessage]) -> None:
        operation = self._open.get(reply.op_id)
        if operation is None:
            let_go(pieces)  # it was withdrawn
        elif operation.add(reply.place, reply.total, pieces):
            if self._open.pop(reply.op_id, None) is None:
                let_go(pieces)
            else:
                self._taken(delivery.stream, operation, reply.slot, operation.pieces)

    def _note_size(self, stream: PeerStream, small: bool) -> None:
        page = self.pages.get(stream)
        if page is not None:
            page.small = small

    def _unpack(self, stream: PeerStream, operation: AnyOperation) -> None:
        """Take the answer from the operation's box."""
        if operation.boxes is None or self._open.pop(operation.op_id, None) is None:
            return  # it was withdrawn, or a message came first
        if operation.kind is OperationKind.PUT:
            operation.finish(None)
        else:
            slot, item = operation.boxes.mail(operation.op_id)
            self._taken(stream, operation, slot, (item,))

    def _taken(self, stream: PeerStream, operation: AnyOperation, slot: int, pieces: Sequence[object]) -> None:
        """Tell that the items are here, before their consumer sees them: they can not go to another one any more."""
        if not operation.claim():
            # It was given up at this very moment, and found itself taken out already.
            let_go(pieces)
            self._endpoint.post(stream, wire.REQUESTS, wire.pack_request(RequestKind.CANCEL, operation.op_id))
            return
        self._sign(stream, slot, operation.op_id)
        operation.arrive(pieces)

    def _sign(self, stream: PeerStream, slot: int, op_id: int) -> None:
        page = self.pages.get(stream)
        if slot != NO_SLOT and page is not None:
            page.receipts.sign(slot, op_id)
        else:
            self._endpoint.post(stream, wire.REQUESTS, wire.pack_request(RequestKind.TAKEN, op_id))


def _end(operation: AnyOperation, reply: ReplyHeader, head: bytes | bytearray) -> None:
    if reply.say == ReplyKind.REFUSED:
        operation.refuse(wire.REASONS[reply.place], head.decode())
    elif reply.say == ReplyKind.FAILED:
        packed = cast("PackedError", pickle.loads(head))  # noqa: S301 - the peer is authenticated
        operation.fail(packed.unpack())
    else:
        operation.arrive((head,))
    if operation.pipeline is not None:
        operation.pipeline.ended((operation.op_id,))
