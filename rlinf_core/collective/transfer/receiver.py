"""The receiving half of an endpoint: passes messages from connections to receives and services."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial

from rlinf_core.collective.arena import Arena, BlockLease, SharedSegment
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.frame import PIECE, Flag, Frame, FrameError, FrameKind, copy_bytes, private_memory
from rlinf_core.collective.transfer.peer_stream import PeerStream, StaleMessageError
from rlinf_core.collective.transfer.peer_streams import PeerStreams
from rlinf_core.collective.transfer.received_messages import Backlog, PostedReceive, ReceivedMessage, find_mismatch
from rlinf_core.collective.work import WaitTable
from rlinf_core.errors import MismatchError, RuntimeFailure

_log = logging.getLogger(__name__)
_MESSAGE = int(FrameKind.MESSAGE)

# The handler of a service: it loads, forwards or releases a message; it replies through the stream.
Handler = Callable[[PeerStream, ReceivedMessage], None]


class Receiver:
    """A receiver that reads connections, one thread each, and passes their messages to receives and services.

    Args:
        lost: called when a connection is over, with the reason.
    """

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        waits: WaitTable,
        streams: PeerStreams,
        backlog: Backlog,
        lost: Callable[[Connection, str], None],
    ) -> None:
        self._inline_limit = settings.inline_limit
        self._arena = arena
        self._waits = waits
        self._streams = streams
        self._backlog = backlog
        self._lost = lost
        self._handlers: dict[int, Handler] = {}
        # By connection: the streams of the routes that the peer announced.
        self._routes: dict[Connection, dict[int, PeerStream]] = {}

    def serve(self, tag: int, handler: Handler) -> None:
        """Pass messages with this tag (from 1) to `handler` as they arrive, in the reading thread: it must not block.

        Messages of one stream arrive in order. The handler owns the message that it gets.
        """
        self._handlers[tag] = handler

    def post(self, stream: PeerStream, posted: PostedReceive) -> bool:
        """Issue a receive; return whether a message had already arrived for it."""
        received = stream.post(posted)
        if received is None:
            if stream.incarnation is not None:
                self._backlog.stir(stream.incarnation)
            if stream.connection is not None:
                posted.turn = stream.connection.turn
            return False
        self._take(stream, posted, received)
        return True

    def _take(self, stream: PeerStream, posted: PostedReceive, received: ReceivedMessage) -> None:
        """Give a waiting message to a receive."""
        self._backlog.taken(received)
        if not self._match(stream, posted, received):
            received.release()

    # Reading

    def read(self, connection: Connection) -> None:
        """Read a connection until its end; runs in the connection's own thread."""
        try:
            self._read_to_end(connection)
        finally:
            # Also if reporting the loss fails, for example because no thread can be started.
            self._routes.pop(connection, None)
            connection.close()

    def _read_to_end(self, connection: Connection) -> None:
        if connection.former:
            self._backlog.stir(connection.peer.incarnation)
        for former in connection.former:
            # Earlier messages come first. The wait ends, since a replaced connection is read to its end.
            former.drained.wait()
        connection.former = ()
        connection.turn.read_some = partial(self._read_some, connection)
        try:
            while True:
                self._read_body_of(connection, connection.reader.read())
                if connection.reader.empty:
                    connection.turn.stand_by()
        except Exception as error:  # noqa: BLE001 - any error ends the connection
            if not isinstance(error, EOFError | OSError | RuntimeFailure):
                _log.exception("what a connection brought could not be handled")
            self._lost(connection, connection.reason_of(error))

    def _read_some(self, connection: Connection) -> bool:
        """Read once, and handle the frames that have arrived with their bodies, in the thread of a waiting caller.

        Return False if the next frame may have to wait for something, which the caller must not.
        """
        reader = connection.reader
        reader.receive()
        while (frame := reader.peek()) is not None:
            size = 0 if frame.flags & Flag.SHARED else frame.body_size
            if frame.flags & Flag.GROWING or size > self._inline_limit or self._backlog.is_full(connection):
                return False
            if not reader.has_body(size):
                break
            reader.skip()
            self._read_body_of(connection, frame)
        return True

    def _read_body_of(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame, after its body."""
        if frame.flags & Flag.TENSOR:
            _check_tensor(frame)
            if frame.flags & Flag.GROWING:
                self._read_growing(connection, frame)
                return
        if frame.flags & Flag.SHARED or not frame.body_size:
            self.arrived(connection, frame)
            return
        posted = self._claim(connection, frame)
        if posted is None:
            received = self._read_body(connection, frame)
        else:
            received = self._read_into(posted, connection, frame, connection.reader.read_now)
            if received is None:
                return
        try:
            self.arrived(connection, frame, received)
        finally:
            self._backlog.free(received.reserved)

    def _read_growing(self, connection: Connection, frame: Frame) -> None:
        """Read a body that its sender still fills: copy each piece into the buffer of a waiting receive, if any."""
        reader, (size,) = connection.reader, frame.sizes
        lease = _lease(connection, frame)
        received = ReceivedMessage(frame, lease=lease)
        announced = memoryview(bytearray(-(-size // PIECE)))

        def copy_next(rest: memoryview) -> int:
            if not reader.read_now(announced[:1]):
                return 0
            start = size - rest.nbytes
            piece = lease.peek()[start : min(size, start + PIECE)]
            copy_bytes(rest, piece)
            return piece.nbytes

        try:
            posted = self._claim(connection, frame)
            if posted is None:
                reader.read_body(announced, self._waits.operations.moved)
            else:
                copy = self._read_into(posted, connection, frame, copy_next)
                received.release()
                if copy is None:
                    return
                received = copy
        except Exception:
            received.release()
            raise
        self.arrived(connection, frame, received)

    def _claim(self, connection: Connection, frame: Frame) -> PostedReceive | None:
        """Return the receive into whose buffer the body can be read, or None."""
        if frame.tag or not frame.flags & Flag.TENSOR or frame.sizes[0] <= self._inline_limit:
            return None
        stream = self._stream(connection, frame)
        return stream.claim(frame.sizes[0], frame.head.decode(), connection.peer.incarnation)

    def _read_body(self, connection: Connection, frame: Frame) -> ReceivedMessage:
        memory, received = self._place(connection, frame)
        try:
            connection.reader.read_body(memory[: frame.body_size], self._waits.operations.moved)
        except Exception:
            received.release()
            self._backlog.free(received.reserved)
            raise
        return received

    def _read_into(
        self, posted: PostedReceive, connection: Connection, frame: Frame, read_now: Callable[[memoryview], int]
    ) -> ReceivedMessage | None:
        """Read a body into the buffer of a receive; return its message if the receive was given up meanwhile."""
        reader, stream = connection.reader, self._stream(connection, frame)
        try:
            while not posted.complete:
                if posted.read(read_now):
                    self._waits.operations.moved()
                else:
                    reader.await_bytes()
        except Exception:
            # If the peer is lost, that fails the receive. If not, the receive takes the next message.
            received = stream.put_back(posted)
            if received is not None:
                self._take(stream, posted, received)
            raise
        if not posted.given_up:
            posted.arrive(None)
        # After `arrive`: until then `PostedReceive.fail` needs the claim, to see that the body is complete.
        body = stream.let_go(posted)
        if body is None and frame.flags & Flag.ACKNOWLEDGE:
            self._acknowledge(stream, frame, None, connection)
        return None if body is None else ReceivedMessage(frame, body)

    def _place(self, connection: Connection, frame: Frame) -> tuple[memoryview, ReceivedMessage]:
        """Return the memory for the body of an arriving frame, and its message; may wait for room in the backlog."""
        size = frame.body_size
        if size <= self._inline_limit:
            memory = memoryview(bytearray(size))
            return memory, ReceivedMessage(frame, memory)
        block = self._arena.try_allocate(size)
        if block is not None:
            return block.memory(), ReceivedMessage(frame, lease=block.lease())
        if frame.tag:
            # Services bound the messages that they get, and a caller may wait for the reply.
            memory = private_memory(size)
            return memory, ReceivedMessage(frame, memory)
        self._backlog.reserve(connection, size, lambda: self._is_awaited(connection))
        try:
            memory = private_memory(size)
        except Exception:
            self._backlog.free(size)
            raise
        received = ReceivedMessage(frame, memory)
        received.reserved = size
        return memory, received

    def _is_awaited(self, connection: Connection) -> bool:
        """Return whether an operation waits for a message that comes through a connection.

        If so, reading continues despite a full backlog, since the awaited message comes after those that fill it. Until
        the operation ends, its peer decides how much memory they take. A replaced connection counts as awaited, because
        its remaining messages come before those of the new one.
        """
        return connection.replaced or self._streams.are_awaited_through(connection, self._waits.waiting())

    # What arrives

    def arrived(self, connection: Connection, frame: Frame, received: ReceivedMessage | None = None) -> None:
        """Handle a complete frame; blocks while the backlog is full."""
        if frame.kind == _MESSAGE:
            self._message(connection, frame, received)
        elif frame.kind == FrameKind.ROUTE:
            self._name_route(connection, frame)
        elif frame.kind in (FrameKind.ACCEPTED, FrameKind.REFUSED):
            self._acknowledged(frame)
        elif frame.kind == FrameKind.GOODBYE:
            connection.peer_closing = True
        elif frame.kind == FrameKind.FORGET:
            connection.segments.pop(frame.sequence, None)
        else:
            raise FrameError(f"the other side sent a frame of kind {frame.kind}")

    def deliver_here(self, stream: PeerStream, received: ReceivedMessage) -> None:
        """Deliver a message to an address in this process."""
        there = self._streams.of(stream.peer, stream.me)
        if received.frame.tag:
            self._serve(there, received)
        else:
            self._give(there, received)

    def _give(self, stream: PeerStream, received: ReceivedMessage) -> bool:
        """Give a message to the next receive; if there is none, keep the message for one and return False."""
        while (posted := stream.deliver(received)) is not None:
            if self._match(stream, posted, received):
                return True
        return False

    def _message(self, connection: Connection, frame: Frame, received: ReceivedMessage | None) -> None:
        stream = self._stream(connection, frame)
        if received is None:
            received = ReceivedMessage(frame, lease=None if frame.place is None else _lease(connection, frame))
        received.connection = connection
        if not frame.tag:
            self._deliver(stream, received, connection)
        elif connection.peer.incarnation in stream.former:
            received.release()
        else:
            self._serve(stream, received)

    def _deliver(self, stream: PeerStream, received: ReceivedMessage, connection: Connection) -> None:
        try:
            if self._give(stream, received):
                return
        except StaleMessageError:
            # A process that was stopped may read the messages of a dead peer after the first of the peer's successor.
            received.release()
            return
        reserved, received.reserved = received.reserved, 0
        self._backlog.add(received, connection, reserved)
        if not connection.turn.led:
            self._backlog.wait_for_room(connection, lambda: self._is_awaited(connection))

    def _match(self, stream: PeerStream, posted: PostedReceive, received: ReceivedMessage) -> bool:
        """Give a message to a receive, or fail the receive if they do not fit, and notify the sender.

        Return False if the receive failed meanwhile: then the message is for the next receive.
        """
        try:
            mismatch = find_mismatch(posted, received, f"{stream.peer} -> {stream.me}")
        except Exception as error:
            # The receive is in no list any more, so nothing else would fail it.
            posted.fail(error)
            received.release()
            raise
        if not (posted.arrive(received) if mismatch is None else posted.fail(mismatch)):
            return False
        if mismatch is not None:
            received.release()
        if mismatch is not None or received.frame.flags & Flag.ACKNOWLEDGE:
            self._acknowledge(stream, received.frame, mismatch, received.connection)
        return True

    def _acknowledge(
        self, stream: PeerStream, frame: Frame, mismatch: MismatchError | None, connection: Connection | None
    ) -> None:
        words = (None, None) if mismatch is None else (mismatch.sent, mismatch.expected)
        if connection is None:
            _settle(self._streams.of(stream.peer, stream.me), frame.sequence, *words)
            return
        kind = FrameKind.ACCEPTED if mismatch is None else FrameKind.REFUSED
        # In the sender's order: its own address first.
        head = json.dumps([stream.peer, stream.me, *words]).encode()
        connection.post(Frame(kind, sequence=frame.sequence, head=head).pack())

    def _serve(self, stream: PeerStream, received: ReceivedMessage) -> None:
        frame = received.frame
        handler = self._handlers.get(frame.tag)
        if handler is None:
            received.release()
            _log.warning(
                "`%s` sent `%s` a message for service %d, which is not here", stream.peer, stream.me, frame.tag
            )
            return
        try:
            handler(stream, received)
        except Exception:  # noqa: BLE001 - a fault in one service must not end the thread that reads for all
            _log.exception("service %d failed on a message from `%s`", frame.tag, stream.peer)

    def _name_route(self, connection: Connection, frame: Frame) -> None:
        source, destination = json.loads(bytes(frame.head))
        stream = self._streams.of(destination, source)
        self._routes.setdefault(connection, {})[frame.route] = stream
        self._streams.bind(stream, connection)

    def _stream(self, connection: Connection, frame: Frame) -> PeerStream:
        try:
            return self._routes[connection][frame.route]
        except KeyError:
            raise FrameError("the other side sent a message on a route that it never named") from None

    def _acknowledged(self, frame: Frame) -> None:
        source, destination, sent, expected = json.loads(bytes(frame.head))
        _settle(self._streams.of(source, destination), frame.sequence, sent, expected)


def _settle(stream: PeerStream, sequence: int, sent: str | None, expected: str | None) -> None:
    error = None
    if sent is not None and expected is not None:
        error = MismatchError(sent, expected, where=f"{stream.me} -> {stream.peer}")
        # Log only its text: a kept record would keep the error's traceback, and with it received messages.
        _log.warning("%s", str(error))
    stream.acknowledged(sequence, error)


def _check_tensor(frame: Frame) -> None:
    """Check a tensor's frame before a receive is taken for it.

    Raises:
        FrameError: the frame contradicts itself.
    """
    try:
        frame.head.decode()
        (size,) = frame.sizes
    except ValueError:
        raise FrameError("the other side sent a tensor without a type and a size") from None
    room = frame.body_size if frame.place is None else frame.place.size
    if size > room or (frame.place is None and size != room):
        raise FrameError(f"the other side announces a tensor of {size} bytes in a body of {room}")


def _lease(connection: Connection, frame: Frame) -> BlockLease:
    place = frame.place
    if place is None:
        raise FrameError("the frame has no place in shared memory")
    segment = connection.segments.get(place.segment)
    if frame.flags & Flag.DESCRIPTOR_FOLLOWS:
        fd = connection.reader.take_fd()
        try:
            event = None if frame.flags & Flag.ONE_SHOT else connection.reader.take_fd()
        except EOFError:
            os.close(fd)
            raise
        if segment is None:
            segment = SharedSegment(fd, place.segment, event, owns_event=True)
        else:
            # Two frames carried the segment's descriptors, since the sender did not know that the first had arrived.
            os.close(fd)
            if event is not None:
                os.close(event)
        if not frame.flags & Flag.ONE_SHOT:
            connection.segments[place.segment] = segment
    if segment is None or place.offset + place.size > segment.size:
        raise FrameError("the other side refers to shared memory that it never passed on")
    return BlockLease(segment, place.offset, place.size, place.lease, bool(frame.flags & Flag.PRIVATE_COPY))
