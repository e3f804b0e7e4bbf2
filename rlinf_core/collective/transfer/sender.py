"""The sending half of an endpoint: from a message to a frame on the right connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from rlinf_core.collective.arena import Arena, ArenaBlock, SharedSegment, spill
from rlinf_core.collective.connections.connection import Connection, ConnectionLostError
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.messages.frame import Flag, Frame, FrameKind, SharedPlace, pack_message
from rlinf_core.collective.messages.message import (
    Bytes,
    EncodedBody,
    Message,
    PlaceholderPart,
    do_nothing,
    inline_body,
    stream_body,
)
from rlinf_core.collective.messages.payload import private_memory
from rlinf_core.collective.transfer.peer_stream import RELAUNCHED, PeerStream
from rlinf_core.collective.transfer.peer_streams import PeerStreams
from rlinf_core.collective.transfer.received_message import ReceivedMessage
from rlinf_core.collective.wait_table import WaitTable
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError, WorkerDiedError

# Bodies in shared memory: between processes of one host, one copy in, and a place of a few bytes in the frame.


class SharedMemoryWriter:
    """Writes bodies to the arena. While that is full it waits, and after a while it takes its own segment.

    So a slow receiver throttles its sender, and two senders that wait for each other's room still make progress.

    Args:
        spill_after: seconds to wait for room before memory outside the arena is taken.
        owners: the receivers of the body; each gets its own lease.
    """

    def __init__(self, arena: Arena, spill_after: float, owners: Sequence[str]) -> None:
        self._arena = arena
        self._spill_after = spill_after
        self._owners = owners

    def encode(self, message: Message, work: Work[object] | None) -> EncodedBody | None:
        """Return the message's body in shared memory; wait for room until `work`'s deadline.

        Without `work` it does not wait, and returns None where there is no room.

        Raises:
            CommunicationTimeoutError: no room became free.
        """
        size = message.body_size
        block = self._arena.try_allocate(size, self._owners) if work is None else self.room(size, work)
        if block is None:
            return None
        self.fill(block, message)
        return shared_body(block, 0, lambda: self._arena.cancel(block))

    def fill(self, block: ArenaBlock, message: Message) -> None:
        try:
            message.gather(block.memory())
        except BaseException:
            self._arena.cancel(block)
            raise

    def room(self, size: int, work: Work[object]) -> ArenaBlock:
        """Return a block for a body, with a lease for each owner; waits for room as `encode`."""
        block = self._arena.try_allocate(size, self._owners)
        if block is not None:
            return block
        # Waiting for room is useless where the body can never fit.
        fits = size <= self._arena.capacity
        spill_at = time.monotonic() + (self._spill_after if fits else 0.0)
        while True:
            now = time.monotonic()
            if now >= spill_at:
                block = spill(size, len(self._owners))
                if block is not None:
                    return block
            error = work.exception()
            if error is not None:
                raise error
            if now >= work.deadline:
                raise self._full(size, work)
            self._arena.wait_for_room(min(work.deadline, max(spill_at, now + 0.1)))
            block = self._arena.try_allocate(size, self._owners)
            if block is not None:
                return block

    def _full(self, size: int, work: Work[object]) -> CommunicationTimeoutError:
        use = self._arena.use()
        holders = ", ".join(f"`{name}` {held}" for name, held in sorted(use.holders.items())) or "nobody"
        return CommunicationTimeoutError(
            work.title,
            work.seconds,
            picture=(
                f"no room for {size} bytes: {use.used} of {use.capacity} bytes of shared memory are in use, held by "
                f"{holders}, and the memory limit leaves no room outside of it"
            ),
            help="receive what was sent, drop what is not needed, or raise RLINF_SHM_LIMIT",
        )


def shared_body(block: ArenaBlock, place: int, undo: Callable[[], None] = do_nothing) -> EncodedBody:
    """Return a body for the holder number `place` of a block."""
    segment = block.segment
    where = SharedPlace(segment.identity, block.offset, block.size, block.leases[place])
    flags = Flag.SHARED | Flag.ONE_SHOT if segment.passes_once else Flag.SHARED
    return EncodedBody(flags, where, fds=descriptors(segment), undo=undo)


def descriptors(segment: SharedSegment) -> tuple[int, ...]:
    """Return the descriptors that another process needs: of the memory, and of the event that signals a release."""
    if segment.release_event is None or segment.orphaned:
        return (segment.fd,)
    return (segment.fd, segment.release_event)


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

    def send(self, stream: PeerStream, message: Message, work: Work[object]) -> None:
        """Send and return when the message's memory may be changed.

        Raises:
            Exception: what `work` fails with: a deadline, a dead peer, an injected failure.
        """
        if stream.run_at_once(lambda: self._try(stream, message)):
            return
        with self._waits.during(work):
            stream.run(lambda: self.transmit(stream, message, work), work)

    def send_async(self, stream: PeerStream, message: Message, work: Work[object]) -> None:
        if message.body_size <= self._settings.direct_limit:
            try:
                done = stream.run_at_once(lambda: self._try(stream, message))
            except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
                work.fail(error)
                return
            if done:
                work.finish(None)
                return
        stream.queue(lambda: self.transmit(stream, message, work), work)

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
                stream.queue(lambda stream=stream, work=work: self.transmit(stream, message, work), work)
        if sharers:
            self._share(message, sharers)
        for work in works:
            work.wait_until(work.deadline)

    def post(
        self, stream: PeerStream, tag: int, key: bytes, head: bytes | bytearray, weight: float, to: str | None
    ) -> bool:
        """Send a few bytes ahead of what is queued on the stream; False when the stream was not used before."""
        connection = stream.connection
        if connection is None or not connection.usable or stream.routed is not connection:
            return False
        if to is not None and to != connection.peer.incarnation:
            return True
        connection.post(pack_message(tag, stream.route, key, head, weight))
        return True

    def share(self, stream: PeerStream, message: Message, size: int, work: Work[object]) -> memoryview | None:
        """Send a message whose body is fresh memory that both sides keep; None where they share none: it has none."""
        connection = self.connect(stream, work)
        block = spill(size, 1) if connection is not None and connection.shares_memory else None
        if connection is None or block is None:
            self.send(stream, message, work)
            return None
        message.parts = [PlaceholderPart(size)]
        # Its own segment is freed with its last reference.
        body = shared_body(block, 0)
        stream.run(lambda: self._write_or_undo(stream, connection, message, body, work), work)
        return block.memory()

    @property
    def limit(self) -> int:
        return self._settings.inline_limit

    # One message at its turn. Without `work` it is sent only if that needs no wait.

    def _try(self, stream: PeerStream, message: Message) -> bool:
        """Send if no wait is needed; return whether it was sent."""
        connection = self.ready_connection(stream)
        body = None if connection is None else self._encode(message, connection, None)
        if connection is None or body is None:
            return False
        return self._write_or_undo(stream, connection, message, body, None)

    def transmit(self, stream: PeerStream, message: Message, work: Work[object]) -> None:
        connection = self.connect(stream, work)
        body = None if connection is None else self._encode(message, connection, work)
        if connection is None or body is None:
            self._deliver_here(stream, message)
        else:
            self._write_or_undo(stream, connection, message, body, work)

    def _encode(self, message: Message, connection: Connection, work: Work[object] | None) -> EncodedBody | None:
        if message.body_size <= self.limit:
            return inline_body(message)
        if not connection.shares_memory:
            return None if work is None else stream_body(message)
        # Copying gigabytes takes seconds in which no other progress is visible.
        self._waits.operations.moved()
        return self._writer((connection.peer.incarnation,)).encode(message, work)

    def _writer(self, owners: Sequence[str]) -> SharedMemoryWriter:
        return SharedMemoryWriter(self._arena, self._settings.spill_after, owners)

    def ready_connection(self, stream: PeerStream) -> Connection | None:
        connection = stream.connection
        return connection if connection is not None and connection.usable else None

    def write(
        self, stream: PeerStream, connection: Connection, message: Message, body: EncodedBody, work: Work[object] | None
    ) -> bool:
        """Write the frame of a message; return whether it was written."""
        if message.to is not None and message.to != connection.peer.incarnation:
            raise WorkerDiedError(stream.peer, cause=RELAUNCHED)
        data, fds = self._frame(stream, connection, message, body)
        try:
            if work is None:
                if not connection.try_write(b"".join((data, *body.buffers)) if body.buffers else data, fds):
                    return False
            else:
                buffers: list[Bytes] = [data, *body.buffers]
                connection.write([b"".join(buffers)] if body.size <= _JOIN else buffers, fds, work)
        except ConnectionLostError as error:
            stream.forget_acknowledgement(stream.sequence + 1)
            if work is None:
                # The explanation may take a moment, which who sends without a wait does not have.
                return False
            raise self._streams.explain(stream.peer, str(error)) from error
        stream.sequence += 1
        stream.routed = connection
        if body.place is not None and not body.flags & Flag.ONE_SHOT:
            connection.passed.add(_segment(body))
        return True

    def _write_or_undo(
        self, stream: PeerStream, connection: Connection, message: Message, body: EncodedBody, work: Work[object] | None
    ) -> bool:
        written = False
        try:
            written = self.write(stream, connection, message, body, work)
        finally:
            if not written:
                body.undo()
        return written

    def _frame(
        self, stream: PeerStream, connection: Connection, message: Message, body: EncodedBody
    ) -> tuple[bytes, Sequence[int]]:
        """Return the bytes of the frame, and of the one that names its route where that is new."""
        opening = b""
        if stream.routed is not connection:
            stream.route = connection.next_route()
            names = json.dumps([stream.me, stream.peer]).encode()
            opening = Frame(FrameKind.ROUTE, route=stream.route, head=names).pack()
        fds: Sequence[int] = ()
        if body.fds and (body.flags & Flag.ONE_SHOT or _segment(body) not in connection.passed):
            fds = body.fds
        frame = message.frame(stream.route, stream.sequence + 1, body)
        if fds:
            frame.flags |= Flag.DESCRIPTOR_FOLLOWS
        if message.acknowledgement is not None:
            self._streams.sent(stream, stream.sequence + 1, message.acknowledgement, connection)
        return opening + frame.pack(), fds

    # Several receivers

    def _connection_or_fail(self, stream: PeerStream, work: Work[object]) -> Connection | None:
        try:
            return self.connect(stream, work)
        except Exception as error:  # noqa: BLE001 - it is the outcome for this peer, not for the others
            work.fail(error)
            return None

    def _share(self, message: Message, sharers: Sequence[tuple[PeerStream, Work[object], Connection]]) -> None:
        writer = self._writer([connection.peer.incarnation for _, _, connection in sharers])
        try:
            block = writer.room(message.body_size, sharers[0][1])
            writer.fill(block, message)
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            for _, work, _ in sharers:
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
        try:
            done = stream.run_at_once(lambda: self.write(stream, connection, message, body, None))
        except Exception as error:  # noqa: BLE001 - it is the outcome for this peer, not for the others
            body.undo()
            work.fail(error)
            return
        if done:
            work.finish(None)
        else:
            stream.queue(lambda: self._write_or_undo(stream, connection, message, body, work), work)

    # Within this process

    def _deliver_here(self, stream: PeerStream, message: Message) -> None:
        size = message.body_size
        stream.sequence += 1
        frame = message.frame(0, stream.sequence, EncodedBody(size=size))
        if message.acknowledgement is not None:
            stream.await_acknowledgement(stream.sequence, message.acknowledgement, None)
        block = self._arena.try_allocate(size) if size > self.limit else None
        if block is None:
            copy = private_memory(size)
            message.gather(copy)
            self.hand_over(stream, ReceivedMessage(frame, copy))
        else:
            message.gather(block.memory())
            self.hand_over(stream, ReceivedMessage(frame, lease=block.lease()))


def _segment(body: EncodedBody) -> int:
    return 0 if body.place is None else body.place.segment
