"""The receiving half of an endpoint: from a complete frame to the receive or the service that it is for."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlinf_core.collective.connections.connection import Connection, ConnectionHandler
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.memory.arena import Arena
from rlinf_core.collective.memory.segment import BlockLease, SharedSegment
from rlinf_core.collective.messages.frame import Flag, Frame, FrameError, FrameKind
from rlinf_core.collective.messages.payload import private_memory
from rlinf_core.collective.messages.received_message import ReceivedMessage
from rlinf_core.collective.transfer.peer_stream import AnyReceive, MessageSource, PeerStream
from rlinf_core.collective.work import WaitTable
from rlinf_core.errors import MismatchError

_log = logging.getLogger(__name__)
_MESSAGE = int(FrameKind.MESSAGE)


@dataclass(slots=True)
class ServiceMessage:
    """A message for a service, which loads, forwards or releases what was received; answers go through the stream."""

    stream: PeerStream
    received: ReceivedMessage
    tag: int
    key: bytes
    weight: float


Handler = Callable[[ServiceMessage], None]


class ReceiverContext(Protocol):
    """The endpoint, as its receiver uses it."""

    @property
    def settings(self) -> Settings: ...
    @property
    def waits(self) -> WaitTable: ...
    @property
    def arena(self) -> Arena: ...
    def stream_by_names(self, me: str, peer: str) -> PeerStream: ...
    def bind(self, stream: PeerStream, connection: Connection) -> None: ...
    def connection_lost(self, connection: Connection, reason: str) -> None: ...
    def hold_back(self, connection: Connection) -> None: ...
    def is_awaited(self, connection: Connection) -> bool: ...
    def explain_later(self, stream: PeerStream, reason: str, then: Callable[[Exception], object]) -> None: ...


@dataclass(slots=True)
class _Arriving:
    """The destination of a body that is being read, where that is not plain memory."""

    stream: PeerStream
    lease: BlockLease | None = None
    claim: AnyReceive | None = None


class Receiver(ConnectionHandler):
    """The receiver: passes the frames of connections to receives and services."""

    def __init__(self, host: ReceiverContext) -> None:
        self._host = host
        self.spin = host.settings.spin
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._handlers: dict[int, Handler] = {}
        # By connection: the routes that the other side named, and the body that it is sending.
        self._routes: dict[Connection, dict[int, PeerStream]] = {}
        self._arriving: dict[Connection, _Arriving] = {}

    def serve(self, tag: int, handler: Handler) -> None:
        self._handlers[tag] = handler

    def may_resume(self, connection: Connection) -> bool:
        if connection.paused and self._host.is_awaited(connection):
            connection.paused = False
        return connection.stalled or not connection.paused

    # Callbacks of connections

    def place(self, connection: Connection, frame: Frame) -> memoryview | None:
        size = frame.body_size
        if size <= self._host.settings.inline_limit:
            return memoryview(bytearray(size))
        stream = self._stream(connection, frame)
        if frame.flags & Flag.TENSOR and not frame.tag:
            claim = stream.incoming.claim(size, bytes(frame.head).decode())
            target = claim.buffer.view() if claim is not None and claim.buffer is not None else None
            if target is not None:
                self._arriving[connection] = _Arriving(stream, claim=claim)
                return target
        block = self._host.arena.try_allocate(size)
        if block is not None:
            self._arriving[connection] = _Arriving(stream, lease=block.lease())
            return block.memory()[:size]
        full = self._waiting_bytes and self._waiting_bytes + size > self._host.settings.inbox_bytes
        if full and not self._host.is_awaited(connection):
            self._host.hold_back(connection)
            return None
        return private_memory(size)

    def arrived(self, connection: Connection, frame: Frame, body: memoryview | None) -> None:
        if frame.kind == _MESSAGE:
            if frame.tag and not frame.sizes:
                stream = self._stream(connection, frame)
                # A process that was stopped reads what a dead one sent after its successor's first words.
                if connection.peer.incarnation not in stream.former:
                    self._serve(stream, ReceivedMessage(frame))
            else:
                self._message(connection, frame, body)
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

    def lost(self, connection: Connection, reason: str) -> None:
        arriving = self._arriving.pop(connection, None)
        self._host.connection_lost(connection, reason)
        self._routes.pop(connection, None)
        if arriving is not None and arriving.lease is not None:
            arriving.lease.release()
        if arriving is not None and arriving.claim is not None:
            claim = arriving.claim
            self._host.explain_later(self._host.stream_by_names("", claim.target), reason, claim.fail)

    def moved(self) -> None:
        self._host.waits.operations.moved()

    # What arrives

    def deliver_here(self, stream: PeerStream, received: ReceivedMessage) -> None:
        stream_there = self._host.stream_by_names(stream.peer, stream.me)
        self._deliver(stream_there, received, _Here(stream))

    def _message(self, connection: Connection, frame: Frame, body: memoryview | None) -> None:
        stream = self._stream(connection, frame)
        arriving = self._arriving.pop(connection, None) if body is not None else None
        if arriving is not None and arriving.claim is not None:
            arriving.claim.filled = True
            arriving.claim.arrive(ReceivedMessage(frame))
            if frame.flags & Flag.ACKNOWLEDGE:
                _There(self, connection, stream).acknowledge(frame, None)
            return
        if frame.place is not None:
            received = ReceivedMessage(frame, lease=_lease(connection, frame))
        elif arriving is not None and arriving.lease is not None:
            received = ReceivedMessage(frame, lease=arriving.lease)
        else:
            received = ReceivedMessage(frame, body)
        if connection.peer.incarnation in stream.former:
            received.release()
            return
        self._deliver(stream, received, _There(self, connection, stream))

    def _deliver(self, stream: PeerStream, received: ReceivedMessage, origin: MessageSource) -> None:
        frame = received.frame
        if not frame.tag:
            stream.incoming.deliver(received, origin)
            return
        self._serve(stream, received)

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
            handler(ServiceMessage(stream, received, frame.tag, frame.key, frame.weight))
        except Exception:  # noqa: BLE001 - who reads serves everybody: a fault in one service must not end the others
            _log.exception("service %d failed on a message from `%s`", frame.tag, stream.peer)

    def _name_route(self, connection: Connection, frame: Frame) -> None:
        source, destination = json.loads(bytes(frame.head))
        stream = self._host.stream_by_names(destination, source)
        self._routes.setdefault(connection, {})[frame.route] = stream
        self._host.bind(stream, connection)

    def _stream(self, connection: Connection, frame: Frame) -> PeerStream:
        try:
            return self._routes[connection][frame.route]
        except KeyError:
            raise FrameError("the other side sent a message on a route that it never named") from None

    def _acknowledged(self, frame: Frame) -> None:
        source, destination, sent, expected = json.loads(bytes(frame.head))
        _settle(self._host.stream_by_names(source, destination), frame.sequence, sent, expected)

    # Backpressure

    def queued(self, connection: Connection, received: ReceivedMessage) -> None:
        with self._lock:
            connection.backlog += 1
            self._waiting_bytes += received.nbytes
            settings = self._host.settings
            full = connection.backlog > settings.inbox_messages or self._waiting_bytes > settings.inbox_bytes
        # Who waits for a message is served, however many lie here for others.
        if full and not connection.paused and not self._host.is_awaited(connection):
            connection.paused = True
            self._host.hold_back(connection)

    def taken(self, connection: Connection, received: ReceivedMessage) -> None:
        with self._lock:
            connection.backlog -= 1
            self._waiting_bytes -= received.nbytes
            settings = self._host.settings
            roomy = connection.backlog * 2 < settings.inbox_messages and self._waiting_bytes * 2 < settings.inbox_bytes
        if connection.paused and roomy:
            connection.paused = False
            connection.arm()


class _There(MessageSource):
    def __init__(self, receiver: Receiver, connection: Connection, stream: PeerStream) -> None:
        self._receiver = receiver
        self._connection = connection
        self._stream = stream

    def acknowledge(self, frame: Frame, mismatch: MismatchError | None) -> None:
        words = (None, None) if mismatch is None else (mismatch.sent, mismatch.expected)
        kind = FrameKind.ACCEPTED if mismatch is None else FrameKind.REFUSED
        # As the sender names the two: its own address first.
        head = json.dumps([self._stream.peer, self._stream.me, *words]).encode()
        self._connection.post(Frame(kind, sequence=frame.sequence, head=head).pack())

    def queued(self, received: ReceivedMessage) -> None:
        self._receiver.queued(self._connection, received)

    def taken(self, received: ReceivedMessage) -> None:
        self._receiver.taken(self._connection, received)


class _Here(MessageSource):
    def __init__(self, stream: PeerStream) -> None:
        self._stream = stream

    def acknowledge(self, frame: Frame, mismatch: MismatchError | None) -> None:
        sent, expected = (None, None) if mismatch is None else (mismatch.sent, mismatch.expected)
        _settle(self._stream, frame.sequence, sent, expected)


def _settle(stream: PeerStream, sequence: int, sent: str | None, expected: str | None) -> None:
    error = None
    if sent is not None and expected is not None:
        error = MismatchError(sent, expected, where=f"{stream.me} -> {stream.peer}")
        # Its text only: a kept record would keep the error's traceback, and with that whatever was received.
        _log.warning("%s", str(error))
    stream.outgoing.acknowledged(sequence, error)


def _lease(connection: Connection, frame: Frame) -> BlockLease:
    place = frame.place
    if place is None:
        raise FrameError("the frame has no place in shared memory")
    segment = connection.segments.get(place.segment)
    if frame.flags & Flag.DESCRIPTOR_FOLLOWS:
        fd = connection.take_fd()
        event = None if frame.flags & Flag.ONE_SHOT else connection.take_fd()
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
