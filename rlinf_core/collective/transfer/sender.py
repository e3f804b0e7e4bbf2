"""The sending half of an endpoint: from a message to a frame on the right connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rlinf_core.collective.connections.connection import Connection, ConnectionLostError
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.memory.arena import Arena, spill
from rlinf_core.collective.messages.frame import Flag, Frame, FrameKind, pack_message
from rlinf_core.collective.messages.message import (
    Bytes,
    EncodedBody,
    Message,
    PlaceholderPart,
    inline_body,
    stream_body,
)
from rlinf_core.collective.messages.payload import private_memory
from rlinf_core.collective.transfer.peer_stream import PeerStream, PeerStreams
from rlinf_core.collective.transfer.received_message import ReceivedMessage
from rlinf_core.collective.transfer.shared_memory import SharedMemoryWriter, shared_body
from rlinf_core.collective.work import WaitTable, Work

# Below this, one buffer is cheaper than two.
_JOIN = 16 << 10


class Sender:
    """The sender of messages, in the calling thread where it may block, else in the stream's own."""

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        waits: WaitTable,
        streams: PeerStreams,
        hand_over: Callable[[PeerStream, ReceivedMessage], None],
    ) -> None:
        """Make a sender; `hand_over` delivers within this process."""
        self._settings = settings
        self._arena = arena
        self._waits = waits
        self._streams = streams
        self.connect = streams.connect
        self.hand_over = hand_over

    def send(
        self, stream: PeerStream, message: Message, work: Work[object], *, acknowledgement: Work[None] | None
    ) -> None:
        """Send and return when the message's memory may be changed.

        Raises:
            Exception: what `work` fails with: a deadline, a dead peer, an injected failure.
        """
        if stream.outgoing.run_at_once(lambda: self._try(stream, message, acknowledgement)):
            return
        with self._waits.during(work):
            stream.outgoing.run(lambda: self.transmit(stream, message, work, acknowledgement), work)

    def send_async(
        self, stream: PeerStream, message: Message, work: Work[object], acknowledgement: Work[None] | None
    ) -> None:
        if message.body_size <= self._settings.direct_limit:
            try:
                done = stream.outgoing.run_at_once(lambda: self._try(stream, message, acknowledgement))
            except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
                work.fail(error)
                return
            if done:
                work.finish(None)
                return
        stream.outgoing.queue(lambda: self.transmit(stream, message, work, acknowledgement), work)

    def broadcast(self, streams: Sequence[PeerStream], message: Message, works: Sequence[Work[object]]) -> None:
        """Send one message to several peers: those on this host share one copy of the body.

        Each stream's outcome is that of its work; returns when the message's memory may be changed.
        """
        sharers: list[tuple[PeerStream, Work[object], Connection]] = []
        for stream, work in zip(streams, works, strict=True):
            connection = self._connection_or_fail(stream, work) if message.body_size > self.limit else None
            # Two members in one process share its mapping, so the second gets its own copy.
            shared_already = any(connection is other for _, _, other in sharers)
            if connection is not None and connection.shares_memory and not shared_already:
                sharers.append((stream, work, connection))
            elif not work.settled:
                stream.outgoing.queue(lambda stream=stream, work=work: self.transmit(stream, message, work, None), work)
        if sharers:
            self._share(message, sharers)
        for work in works:
            work.wait_until(work.deadline)

    def post(self, stream: PeerStream, tag: int, key: bytes, head: bytes | bytearray, weight: float) -> bool:
        """Send a few bytes ahead of what is queued on the stream; False when the stream was not used before."""
        connection = stream.outgoing.connection
        if connection is None or connection.closed or stream.outgoing.routed is not connection:
            return False
        connection.post(pack_message(tag, stream.outgoing.route, key, head, weight))
        return True

    def share(self, stream: PeerStream, message: Message, size: int, work: Work[object]) -> memoryview | None:
        """Send a message whose body is fresh memory that both sides keep; None where they share none: it has none."""
        connection = self.connect(stream, work)
        block = spill(size, 1) if connection is not None and connection.shares_memory else None
        if connection is None or block is None:
            self.send(stream, message, work, acknowledgement=None)
            return None
        message.parts = [PlaceholderPart(size)]
        body = shared_body(block, 0, _keep)
        stream.outgoing.run(lambda: self.write(stream, connection, message, body, work, None), work)
        return block.memory()

    @property
    def limit(self) -> int:
        return self._settings.inline_limit

    # One message at its turn

    def _try(self, stream: PeerStream, message: Message, acknowledgement: Work[None] | None) -> bool:
        """Send if no wait is needed; return whether it was sent."""
        connection = self.ready_connection(stream)
        if connection is None:
            return False
        size = message.body_size
        if size <= self.limit:
            return self.write_now(stream, connection, message, inline_body(message), acknowledgement)
        if not connection.shares_memory:
            return False
        block = self._arena.try_allocate(size, (connection.peer.incarnation,))
        if block is None:
            return False
        body = shared_body(block, 0, lambda: self._arena.cancel(block))
        done = False
        try:
            message.gather(block.memory())
            done = self.write_now(stream, connection, message, body, acknowledgement)
        finally:
            if not done:
                body.undo()
        return done

    def transmit(
        self, stream: PeerStream, message: Message, work: Work[object], acknowledgement: Work[None] | None
    ) -> None:
        connection = self.connect(stream, work)
        if connection is None:
            self._deliver_here(stream, message, acknowledgement)
            return
        body = self._encode(message, connection, work)
        self._write_or_undo(stream, connection, message, body, work, acknowledgement)

    def _encode(self, message: Message, connection: Connection, work: Work[object]) -> EncodedBody:
        if message.body_size <= self.limit:
            return inline_body(message)
        if not connection.shares_memory:
            return stream_body(message)
        # Copying gigabytes takes seconds in which no other progress is visible.
        self._waits.operations.moved()
        return self._writer((connection.peer.incarnation,)).encode(message, work)

    def _writer(self, owners: Sequence[str]) -> SharedMemoryWriter:
        return SharedMemoryWriter(self._arena, self._settings.spill_after, owners)

    def ready_connection(self, stream: PeerStream) -> Connection | None:
        connection = stream.outgoing.connection
        return None if connection is None or connection.closed else connection

    def write_now(
        self,
        stream: PeerStream,
        connection: Connection,
        message: Message,
        body: EncodedBody,
        acknowledgement: Work[None] | None,
    ) -> bool:
        data, fds = self._frame(stream, connection, message, body, acknowledgement)
        if body.buffers:
            data = b"".join((data, *body.buffers))
        try:
            written = connection.try_write(data, fds)
        except ConnectionLostError as error:
            stream.outgoing.unacknowledged.pop(stream.outgoing.sequence + 1, None)
            raise self._streams.explain(stream.peer, str(error)) from error
        if written:
            self._written(stream, connection, body)
        return written

    def write(
        self,
        stream: PeerStream,
        connection: Connection,
        message: Message,
        body: EncodedBody,
        work: Work[object],
        acknowledgement: Work[None] | None,
    ) -> None:
        data, fds = self._frame(stream, connection, message, body, acknowledgement)
        buffers: list[Bytes] = [data, *body.buffers]
        if body.size <= _JOIN:
            buffers = [b"".join(buffers)]
        try:
            connection.write(buffers, fds, work)
        except ConnectionLostError as error:
            raise self._streams.explain(stream.peer, str(error)) from error
        self._written(stream, connection, body)

    def _frame(
        self,
        stream: PeerStream,
        connection: Connection,
        message: Message,
        body: EncodedBody,
        acknowledgement: Work[None] | None,
    ) -> tuple[bytes, Sequence[int]]:
        """Return the bytes of the frame, and of the one that names its route where that is new."""
        outgoing = stream.outgoing
        opening = b""
        if outgoing.routed is not connection:
            outgoing.route = connection.next_route()
            names = json.dumps([stream.me, stream.peer]).encode()
            opening = Frame(FrameKind.ROUTE, route=outgoing.route, head=names).pack()
        fds: Sequence[int] = ()
        if body.fds and (body.flags & Flag.ONE_SHOT or _segment(body) not in connection.passed):
            fds = body.fds
        frame = message.frame(FrameKind.MESSAGE, outgoing.route, outgoing.sequence + 1, body)
        if fds:
            frame.flags |= Flag.DESCRIPTOR_FOLLOWS
        if acknowledgement is not None:
            frame.flags |= Flag.ACKNOWLEDGE
            outgoing.unacknowledged[outgoing.sequence + 1] = acknowledgement
        return opening + frame.pack(), fds

    def _write_or_undo(
        self,
        stream: PeerStream,
        connection: Connection,
        message: Message,
        body: EncodedBody,
        work: Work[object],
        acknowledgement: Work[None] | None,
    ) -> None:
        try:
            self.write(stream, connection, message, body, work, acknowledgement)
        except BaseException:
            body.undo()
            raise

    def _written(self, stream: PeerStream, connection: Connection, body: EncodedBody) -> None:
        stream.outgoing.sequence += 1
        stream.outgoing.routed = connection
        if body.place is not None and not body.flags & Flag.ONE_SHOT:
            connection.passed.add(_segment(body))

    # Several receivers

    def _connection_or_fail(self, stream: PeerStream, work: Work[object]) -> Connection | None:
        try:
            return self.connect(stream, work)
        except Exception as error:  # noqa: BLE001 - it is the outcome for this peer, not for the others
            work.fail(error)
            return None

    def _share(self, message: Message, sharers: Sequence[tuple[PeerStream, Work[object], Connection]]) -> None:
        owners = [connection.peer.incarnation for _, _, connection in sharers]
        works = [work for _, work, _ in sharers]
        try:
            block = self._writer(owners).fill(message, works[0])
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            for work in works:
                work.fail(error)
            return
        for place, (stream, work, connection) in enumerate(sharers):
            body = shared_body(block, place, lambda place=place: self._arena.cancel_lease(block, place))
            if len(sharers) > 1:
                body.flags |= Flag.PRIVATE_COPY

            self._write_share(stream, message, work, connection, body)

    def _write_share(
        self, stream: PeerStream, message: Message, work: Work[object], connection: Connection, body: EncodedBody
    ) -> None:
        def write() -> None:
            self._write_or_undo(stream, connection, message, body, work, None)

        try:
            done = stream.outgoing.run_at_once(lambda: self.write_now(stream, connection, message, body, None))
        except Exception as error:  # noqa: BLE001 - it is the outcome for this peer, not for the others
            body.undo()
            work.fail(error)
            return
        if done:
            work.finish(None)
        else:
            stream.outgoing.queue(write, work)

    # Within this process

    def _deliver_here(self, stream: PeerStream, message: Message, acknowledgement: Work[None] | None) -> None:
        size = message.body_size
        stream.outgoing.sequence += 1
        frame = message.frame(FrameKind.MESSAGE, 0, stream.outgoing.sequence, EncodedBody(size=size))
        if acknowledgement is not None:
            frame.flags |= Flag.ACKNOWLEDGE
            stream.outgoing.unacknowledged[stream.outgoing.sequence] = acknowledgement
        block = self._arena.try_allocate(size) if size > self.limit else None
        if block is None:
            copy = private_memory(size)
            message.gather(copy)
            self.hand_over(stream, ReceivedMessage(frame, copy))
        else:
            message.gather(block.memory())
            self.hand_over(stream, ReceivedMessage(frame, lease=block.lease()))


def _keep() -> None:
    """Do nothing: its own segment is freed with its last reference."""


def _segment(body: EncodedBody) -> int:
    return 0 if body.place is None else body.place.segment
