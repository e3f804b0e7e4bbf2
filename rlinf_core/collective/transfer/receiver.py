"""The receiving half of an endpoint: from a connection to the receive or the service that a message is for."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable

from rlinf_core.collective.arena import Arena, BlockLease, SharedSegment
from rlinf_core.collective.connections.connection import Connection
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.messages.frame import Flag, Frame, FrameError, FrameKind
from rlinf_core.collective.messages.payload import private_memory
from rlinf_core.collective.transfer.backlog import Backlog
from rlinf_core.collective.transfer.peer_stream import PeerStream, StaleMessageError
from rlinf_core.collective.transfer.peer_streams import PeerStreams
from rlinf_core.collective.transfer.received_message import PostedReceive, ReceivedMessage, find_mismatch
from rlinf_core.collective.work import WaitTable
from rlinf_core.errors import MismatchError, RuntimeFailure

_log = logging.getLogger(__name__)
_MESSAGE = int(FrameKind.MESSAGE)

# A service: it loads, forwards or releases what was received; answers go through the stream.
Handler = Callable[[PeerStream, ReceivedMessage], None]


class Receiver:
    """The receiver: reads connections, each in a thread of its own, and passes messages to receives and services.

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
        # By connection: the routes that the other side named.
        self._routes: dict[Connection, dict[int, PeerStream]] = {}

    def serve(self, tag: int, handler: Handler) -> None:
        """Pass messages with this tag (from 1) to `handler` as they arrive, in the reading thread: it must not block.

        They arrive in order for each stream. The handler owns the message that it gets.
        """
        self._handlers[tag] = handler

    def post(self, stream: PeerStream, posted: PostedReceive) -> bool:
        """Issue a receive; return whether a message was there for it."""
        received = stream.post(posted)
        if received is None:
            if stream.incarnation is not None:
                self._backlog.stir(stream.incarnation)
            return False
        self._take(stream, posted, received)
        return True

    def _take(self, stream: PeerStream, posted: PostedReceive, received: ReceivedMessage) -> None:
        """Give a message that waited to a receive."""
        self._backlog.taken(received)
        if not self._match(stream, posted, received):
            received.release()

    # Reading

    def read(self, connection: Connection) -> None:
        """Receive what comes through a connection until its end; in a thread of its own."""
        try:
            self._read_to_end(connection)
        finally:
            # Also where the loss cannot be told, as where no thread can be started for that.
            self._routes.pop(connection, None)
            connection.close()

    def _read_to_end(self, connection: Connection) -> None:
        if connection.former:
            self._backlog.stir(connection.peer.incarnation)
        for former in connection.former:
            # What its peer sent before. It ends by itself: nothing more is sent there, and whatever is left is read.
            former.drained.wait()
        connection.former = ()
        try:
            while True:
                self._read_frame(connection)
        except Exception as error:  # noqa: BLE001 - whatever it is, the connection is over
            if not isinstance(error, EOFError | OSError | RuntimeFailure):
                _log.exception("what a connection brought could not be handled")
            self._lost(connection, connection.reason_of(error))

    def _read_frame(self, connection: Connection) -> None:
        frame = connection.reader.read()
        if frame.flags & Flag.TENSOR:
            _check_tensor(frame)
        if frame.flags & Flag.SHARED or not frame.body_size:
            self.arrived(connection, frame)
            return
        posted = self._claim(connection, frame)
        if posted is None:
            received = self._read_body(connection, frame)
        else:
            body = self._read_into(posted, connection, frame)
            if body is None:
                return
            received = ReceivedMessage(frame, body)
        try:
            self.arrived(connection, frame, received)
        finally:
            self._backlog.free(received.reserved)

    def _claim(self, connection: Connection, frame: Frame) -> PostedReceive | None:
        """Return the receive into whose buffer the body is read, if any."""
        if frame.tag or not frame.flags & Flag.TENSOR or frame.body_size <= self._inline_limit:
            return None
        stream = self._stream(connection, frame)
        return stream.claim(frame.body_size, frame.head.decode(), connection.peer.incarnation)

    def _read_body(self, connection: Connection, frame: Frame) -> ReceivedMessage:
        memory, received = self._place(connection, frame)
        try:
            connection.reader.read_body(memory[: frame.body_size], self._waits.operations.moved)
        except Exception:
            received.release()
            self._backlog.free(received.reserved)
            raise
        return received

    def _read_into(self, posted: PostedReceive, connection: Connection, frame: Frame) -> memoryview | None:
        """Read a body into the buffer of a receive; return it where that was given up meanwhile."""
        reader, stream = connection.reader, self._stream(connection, frame)
        try:
            while not posted.complete:
                if posted.read(reader.read_now):
                    self._waits.operations.moved()
                else:
                    reader.await_bytes()
        except Exception:
            # The loss of the peer ends the receive, if it is that. Else the next message is for it.
            received = stream.put_back(posted)
            if received is not None:
                self._take(stream, posted, received)
            raise
        if not posted.given_up:
            posted.arrive(None)
        # Only now: until then, who fails the receive learns here that its message has come.
        body = stream.let_go(posted)
        if body is None and frame.flags & Flag.ACKNOWLEDGE:
            self._acknowledge(stream, frame, None, connection)
        return body

    def _place(self, connection: Connection, frame: Frame) -> tuple[memoryview, ReceivedMessage]:
        """Return the memory for the body of an arriving frame, and its message; wait while there is none."""
        size = frame.body_size
        if size <= self._inline_limit:
            memory = memoryview(bytearray(size))
            return memory, ReceivedMessage(frame, memory)
        block = self._arena.try_allocate(size)
        if block is not None:
            return block.memory(), ReceivedMessage(frame, lease=block.lease())
        if frame.tag:
            # A service bounds what it gets, and somebody may wait for its answer.
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
        """Return whether an operation waits for what comes through a connection.

        Then reading continues despite a full backlog: messages come in order, and what is awaited lies after those
        that fill it. Until the operation ends or times out, its peer decides how much memory they take. What is left in
        a connection that was replaced comes before what the new one brings.
        """
        return connection.replaced or self._streams.are_awaited_through(connection, self._waits.waiting())

    # What arrives

    def arrived(self, connection: Connection, frame: Frame, received: ReceivedMessage | None = None) -> None:
        """Handle a complete frame; blocks while too much waits to be received."""
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
        """Deliver a message of this process to itself."""
        there = self._streams.of(stream.peer, stream.me)
        if received.frame.tag:
            self._serve(there, received)
        else:
            self._give(there, received)

    def _give(self, stream: PeerStream, received: ReceivedMessage) -> bool:
        """Give a message to the receive whose turn it is; return False where none has arrived, and it waits for one."""
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
            # A process that was stopped reads what a dead one sent after its successor's first words.
            received.release()
            return
        reserved, received.reserved = received.reserved, 0
        self._backlog.add(received, connection, reserved)
        self._backlog.wait_for_room(connection, lambda: self._is_awaited(connection))

    def _match(self, stream: PeerStream, posted: PostedReceive, received: ReceivedMessage) -> bool:
        """Give a message to a receive, if it fits, and say so to its sender.

        Return False where the receive was failed at this moment: then the message is the next one's.
        """
        try:
            mismatch = find_mismatch(posted, received, f"{stream.peer} -> {stream.me}")
        except Exception as error:
            # No other list has it any more.
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
        # As the sender names the two: its own address first.
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
        except Exception:  # noqa: BLE001 - who reads serves everybody: a fault in one service must not end the others
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
        # Its text only: a kept record would keep the error's traceback, and with that whatever was received.
        _log.warning("%s", str(error))
    stream.acknowledged(sequence, error)


def _check_tensor(frame: Frame) -> None:
    """Check what a tensor's frame says of itself, before a receive is taken for it.

    Raises:
        FrameError: it contradicts itself.
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
            # Two frames carried it before the sender knew that the first had arrived.
            os.close(fd)
            if event is not None:
                os.close(event)
        if not frame.flags & Flag.ONE_SHOT:
            connection.segments[place.segment] = segment
    if segment is None or place.offset + place.size > segment.size:
        raise FrameError("the other side refers to shared memory that it never passed on")
    return BlockLease(segment, place.offset, place.size, place.lease, bool(frame.flags & Flag.PRIVATE_COPY))
