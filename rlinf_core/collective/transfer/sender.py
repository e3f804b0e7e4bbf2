"""The sending half of an endpoint: encodes messages as frames and writes them to the right connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

from rlinf_core.collective.arena import LOCAL, Arena, ArenaBlock, BlockLease, spill
from rlinf_core.collective.connection import Connection, ConnectionLostError
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.frame import (
    PIECE,
    Flag,
    Frame,
    FrameKind,
    SharedPlace,
    copy_bytes,
    pack_message,
    private_memory,
)
from rlinf_core.collective.message import (
    Bytes,
    EncodedBody,
    Message,
    inline_body,
    stream_body,
)
from rlinf_core.collective.transfer.peer_stream import RELAUNCHED, PeerStream
from rlinf_core.collective.transfer.peer_streams import PeerStreams
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import CommunicationTimeoutError, WorkerDiedError


def shared_body(lease: BlockLease, undo: Callable[[], None] = lambda: None) -> EncodedBody:
    """Return a body in shared memory, for the peer that is to hold the lease."""
    segment = lease.segment
    place = SharedPlace(segment.identity, lease.offset, lease.size, lease.index)
    if segment.orphaned or segment.release_event is None:
        return EncodedBody(Flag.SHARED | Flag.ONE_SHOT, place, fds=(segment.fd,), undo=undo)
    # The receiver keeps the segment for further messages, and signals each release by the event.
    return EncodedBody(Flag.SHARED, place, fds=(segment.fd, segment.release_event), undo=undo)


# Below this, one buffer is cheaper than two.
_JOIN = 16 << 10
_LOOK_AGAIN = 0.1


class Sender:
    """The sender of messages, in the calling thread if it may block, else in the stream's own thread.

    Bodies for processes of this host are copied once, into shared memory; the frame holds only their place.
    """

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        waits: WaitTable,
        streams: PeerStreams,
        hand_over: Callable[[PeerStream, ReceivedMessage], None],
        check_open: Callable[[], None],
    ) -> None:
        """Make a sender; `hand_over` delivers within this process, and `check_open` raises if sending is forbidden."""
        self._settings = settings
        self._arena = arena
        self._waits = waits
        self._streams = streams
        self.connect = streams.connect
        self._hand_over = hand_over
        self.check_open = check_open
        self.limit = settings.inline_limit

    def send(self, stream: PeerStream, message: Message, work: Work[object]) -> None:
        """Send, and return when the message's memory may be changed, which may be before the message is received.

        Raises:
            Exception: the failure of `work`: a timeout, a dead peer, or a failure injected by another thread.
        """
        self.check_open()
        if stream.run_at_once(lambda: self.transmit(stream, message, None)):
            return
        with self._waits.during(work):
            stream.run(lambda: self.transmit(stream, message, work), work)

    def send_async(self, stream: PeerStream, message: Message, work: Work[object]) -> None:
        """Send in the background; `work` finishes when the message's memory may be changed."""
        self.check_open()
        small = message.body_size <= self._settings.direct_limit
        stream.start(
            lambda: small and self.transmit(stream, message, None), lambda: self.transmit(stream, message, work), work
        )

    def broadcast(self, streams: Sequence[PeerStream], message: Message, works: Sequence[Work[object]]) -> None:
        """Send one message to several peers; those on this host share one copy of the body.

        Each work has the outcome of its stream. Returns when the message's memory may be changed, or at the deadline.
        """
        self.check_open()
        sharers: list[tuple[PeerStream, Work[object], Connection]] = []
        for stream, work in zip(streams, works, strict=True):
            connection = self._connection_or_fail(stream, work) if message.body_size > self.limit else None
            # Two members in one process would share one mapping, so the second gets its own copy.
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
        self,
        stream: PeerStream,
        tag: int,
        key: bytes,
        head: bytes | bytearray = b"",
        weight: float = 0.0,
        *,
        to: str | None = None,
    ) -> bool:
        """Send a small message to a service, ahead of the messages queued on the stream; never blocks.

        Return False, without sending, if the stream has not yet sent a message through its present connection. If the
        endpoint `to` was relaunched, drop the message.
        """
        connection = stream.connection
        if connection is None or not connection.usable or stream.routed is not connection:
            return False
        if to is not None and to != connection.peer.incarnation:
            return True
        connection.post(pack_message(tag, stream.route, key, head, weight))
        return True

    def share(self, stream: PeerStream, message: Message, size: int, work: Work[object]) -> memoryview | None:
        """Send a message whose body is new memory of `size` bytes that both sides keep and write.

        Return that memory; None if the peer cannot share it, for example on another host: then the message has no body.
        """
        self.check_open()
        connection = self.connect(stream, work)
        block = spill(size, 1) if connection is not None and connection.shares_memory else None
        if connection is None or block is None:
            self.send(stream, message, work)
            return None
        message.sizes = (size,)
        # Needs no undo: the block's segment is freed with its last reference.
        body = shared_body(block.lease())
        stream.run(lambda: self._write_or_undo(stream, connection, message, body, work), work)
        return block.memory()

    # Sending one message when it is its turn. Without `work`, a message is sent only if that needs no wait.

    def transmit(self, stream: PeerStream, message: Message, work: Work[object] | None) -> bool:
        """Send a message; return whether it was sent."""
        connection = self.ready_connection(stream) if work is None else self.connect(stream, work)
        if connection is None:
            if work is not None:
                self._deliver_here(stream, message)
            return work is not None
        body = self._encode(message, connection, work)
        return body is not None and self._write_or_undo(stream, connection, message, body, work)

    def _encode(self, message: Message, connection: Connection, work: Work[object] | None) -> EncodedBody | None:
        """Return the body of a message; None if it must wait for room or for the network and there is no `work`.

        Raises:
            CommunicationTimeoutError: no room became free in time.
        """
        size = message.body_size
        if size <= self.limit:
            return inline_body(message)
        if not connection.shares_memory:
            return None if work is None else stream_body(message)
        # Copying gigabytes takes seconds without other visible progress.
        self._waits.operations.moved()
        source = message.parts[0].view() if message.flags & Flag.TENSOR and size >= 2 * PIECE else None
        if source is not None:
            # Announcing its pieces may block.
            return None if work is None else self._growing_body(source, connection.peer.incarnation, work)
        owners = (connection.peer.incarnation,)
        block = self._arena.try_allocate(size, owners) if work is None else self._room(size, owners, work)
        if block is None:
            return None
        self._fill(block, message)
        return shared_body(block.lease(), lambda: self._arena.cancel(block))

    def _growing_body(self, source: memoryview, owner: str, work: Work[object]) -> EncodedBody:
        """Return a body that is filled once its frame has left, so that its receiver copies it out meanwhile.

        Two copies at a time, on two cores, take little longer than one. The sender does not wait for the receiver.
        """
        block = self._room(source.nbytes, (owner, LOCAL), work)
        leases = list(block.leases)

        def fill() -> Iterator[bytes]:
            # The receiver has its lease now. The other one keeps the block until it is filled, even if that one ends.
            del leases[0]
            for start in range(0, source.nbytes, PIECE):
                copy_bytes(block.memory()[start:], source[start : start + PIECE])
                self._waits.operations.moved()
                yield b"\0"
            undo()

        def undo() -> None:
            if leases:
                self._arena.cancel(block, *leases)
                leases.clear()

        body = shared_body(block.lease(), undo)
        body.flags |= Flag.GROWING
        body.pieces = fill()
        return body

    def _fill(self, block: ArenaBlock, message: Message) -> None:
        try:
            message.gather(block.memory())
        except BaseException:
            self._arena.cancel(block)
            raise

    def _room(self, size: int, owners: Sequence[str], work: Work[object]) -> ArenaBlock:
        """Return a block with a lease for each owner; if the arena stays full, a block in a segment of its own.

        The wait lets a slow receiver throttle its sender; the extra segment lets two processes that wait for each other
        make progress.
        """
        block = self._arena.try_allocate(size, owners)
        if block is not None:
            return block
        # Waiting for room is useless where the body can never fit.
        fits = size <= self._arena.capacity
        spill_at = time.monotonic() + (self._settings.spill_after if fits else 0.0)
        while True:
            now = time.monotonic()
            if now >= spill_at:
                block = spill(size, len(owners))
                if block is not None:
                    return block
            error = work.exception()
            if error is not None:
                raise error
            if now >= work.deadline:
                raise self._full(size, work)
            self._arena.wait_for_room(min(work.deadline, max(spill_at, now + _LOOK_AGAIN)))
            block = self._arena.try_allocate(size, owners)
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
                connection.write([b"".join(buffers)] if body.size <= _JOIN else buffers, fds, work, body.pieces)
        except ConnectionLostError as error:
            stream.unacknowledged.pop(stream.sequence + 1, None)
            if work is None:
                # Explaining the loss may block, which a caller without `work` must not.
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
        """Return the frame's bytes, after those of a frame that names a new route, and the descriptors to pass."""
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
        owners = [connection.peer.incarnation for _, _, connection in sharers]
        try:
            block = self._room(message.body_size, owners, sharers[0][1])
            self._fill(block, message)
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            for _, work, _ in sharers:
                work.fail(error)
            return
        for place, (stream, work, connection) in enumerate(sharers):
            lease = block.lease(place)
            body = shared_body(lease, lambda lease=lease: self._arena.cancel(block, lease.index))
            if len(sharers) > 1:
                body.flags |= Flag.PRIVATE_COPY
            self._write_share(stream, message, work, connection, body)

    def _write_share(
        self, stream: PeerStream, message: Message, work: Work[object], connection: Connection, body: EncodedBody
    ) -> None:
        def at_once() -> bool:
            try:
                return self.write(stream, connection, message, body, None)
            except BaseException:
                body.undo()
                raise

        stream.start(at_once, lambda: self._write_or_undo(stream, connection, message, body, work), work)

    # Within this process

    def _deliver_here(self, stream: PeerStream, message: Message) -> None:
        size = message.body_size
        stream.sequence += 1
        frame = message.frame(0, stream.sequence, EncodedBody(size=size))
        if message.acknowledgement is not None:
            stream.unacknowledged[stream.sequence] = message.acknowledgement, None
        block = self._arena.try_allocate(size) if size > self.limit else None
        if block is None:
            copy = private_memory(size)
            message.gather(copy)
            self._hand_over(stream, ReceivedMessage(frame, copy))
        else:
            message.gather(block.memory())
            self._hand_over(stream, ReceivedMessage(frame, lease=block.lease()))


def _segment(body: EncodedBody) -> int:
    return 0 if body.place is None else body.place.segment
