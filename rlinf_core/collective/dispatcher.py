"""The incoming half of an endpoint: from a frame that is complete to whoever waits for it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlinf_core.collective.arena import Arena
from rlinf_core.collective.connection import Connection, Watcher
from rlinf_core.collective.frame import Flag, Frame, Kind, ProtocolError
from rlinf_core.collective.growth import Growth
from rlinf_core.collective.link import AnyReceipt, Link, Origin
from rlinf_core.collective.parcel import Parcel, private_memory
from rlinf_core.collective.segment import Lease, Segment
from rlinf_core.collective.settings import Settings
from rlinf_core.collective.transports.device import DeviceRouter
from rlinf_core.collective.transports.growing import read_grown
from rlinf_core.collective.work import Board
from rlinf_core.errors import MismatchError, PayloadError

_log = logging.getLogger(__name__)
_MESSAGE = int(Kind.MESSAGE)


@dataclass(slots=True)
class Delivery:
    """A message for a service.

    Attributes:
        link: from whom to whom; answers go through it.
        parcel: the message, the service's own: it loads, forwards or releases it.
        tag: of the service.
        key: the sender's words.
        weight: of the item.
    """

    link: Link
    parcel: Parcel
    tag: int
    key: bytes
    weight: float


Handler = Callable[[Delivery], None]


class Host(Protocol):
    """What the dispatcher needs from its endpoint."""

    @property
    def settings(self) -> Settings: ...
    @property
    def board(self) -> Board: ...
    @property
    def arena(self) -> Arena: ...
    @property
    def devices(self) -> DeviceRouter: ...
    def link_by_names(self, me: str, peer: str) -> Link: ...
    def bind(self, link: Link, connection: Connection) -> None: ...
    def connection_lost(self, connection: Connection, reason: str) -> None: ...
    def hold_back(self, connection: Connection) -> None: ...
    def explain(self, link: Link, reason: str) -> Exception: ...


@dataclass(slots=True)
class _Arriving:
    """Where the body that a connection is reading goes, where that is no plain memory."""

    link: Link
    lease: Lease | None = None
    claim: AnyReceipt | None = None


class Dispatcher(Watcher):
    """Takes frames from connections, and gives them to receives and services."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.spin = host.settings.spin
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._handlers: dict[int, Handler] = {}
        # By connection: the routes that the other side named, and the body that it is sending.
        self._routes: dict[Connection, dict[int, Link]] = {}
        self._arriving: dict[Connection, _Arriving] = {}
        # Bodies that their senders still write, by connection, and there by route and number.
        self._growing: dict[Connection, dict[tuple[int, int], Growth]] = {}

    def serve(self, tag: int, handler: Handler) -> None:
        """Messages with this tag go to `handler`."""
        self._handlers[tag] = handler

    def may_resume(self, connection: Connection) -> bool:
        """Return whether a connection that was held back may read again."""
        return connection.stalled or not connection.paused

    # What connections ask and tell

    def place(self, connection: Connection, frame: Frame) -> memoryview | None:
        size = frame.body_size
        if size <= self._host.settings.inline_limit:
            return memoryview(bytearray(size))
        link = self._link(connection, frame)
        if frame.flags & Flag.TENSOR and not frame.tag and not any(frame.kinds):
            claim = link.incoming.claim(size, bytes(frame.head).decode())
            target = claim.buffer.view() if claim is not None and claim.buffer is not None else None
            if target is not None:
                self._arriving[connection] = _Arriving(link, claim=claim)
                return target
        block = self._host.arena.try_allocate(size)
        if block is not None:
            self._arriving[connection] = _Arriving(link, lease=block.lease())
            return block.memory()[:size]
        if self._waiting_bytes and self._waiting_bytes + size > self._host.settings.inbox_bytes:
            self._host.hold_back(connection)
            return None
        return private_memory(size)

    def arrived(self, connection: Connection, frame: Frame, body: memoryview | None) -> None:
        if frame.kind == _MESSAGE:
            if frame.tag and not frame.sizes:
                self._serve(self._link(connection, frame), Parcel(frame))
            else:
                self._message(connection, frame, body)
        elif frame.kind == Kind.GROWN:
            self._grown(connection, frame)
        elif frame.kind == Kind.ROUTE:
            self._name_route(connection, frame)
        elif frame.kind in (Kind.ACCEPTED, Kind.REFUSED):
            self._acknowledged(connection, frame)
        elif frame.kind == Kind.GOODBYE:
            connection.farewell = True
        elif frame.kind == Kind.FORGET:
            connection.segments.pop(frame.sequence, None)
        else:
            raise ProtocolError(f"the other side sent a frame of kind {frame.kind}")

    def lost(self, connection: Connection, reason: str) -> None:
        arriving = self._arriving.pop(connection, None)
        self._host.connection_lost(connection, reason)
        # It is closed by now: one that begins at this very moment sees that for itself.
        growing = self._growing.pop(connection, {})
        routes = self._routes.pop(connection, {})
        if arriving is not None and arriving.lease is not None:
            arriving.lease.release()
        if arriving is not None and arriving.claim is not None:
            claim = arriving.claim
            self._mourn(claim.fail, self._host.link_by_names("", claim.target), reason)
        for (route, _), growth in growing.items():
            self._mourn(growth.fail, routes[route], reason)

    def _mourn(self, fail: Callable[[Exception], object], link: Link, reason: str) -> None:
        """End what will never be whole; not in this thread, which reads for all: to explain may take a moment."""

        def explain_and_fail() -> None:
            fail(self._host.explain(link, reason))

        threading.Thread(target=explain_and_fail, name="rlinf-lost", daemon=True).start()

    def moved(self) -> None:
        self._host.board.operations.moved()

    # What arrives

    def deliver_here(self, link: Link, parcel: Parcel) -> None:
        """A message from an address of this process to another."""
        there = self._host.link_by_names(link.peer, link.me)
        self._deliver(there, parcel, _Here(link))

    def _message(self, connection: Connection, frame: Frame, body: memoryview | None) -> None:
        link = self._link(connection, frame)
        arriving = self._arriving.pop(connection, None) if body is not None else None
        if arriving is not None and arriving.claim is not None:
            arriving.claim.filled = True
            arriving.claim.arrive(Parcel(frame))
            if frame.flags & Flag.ACKNOWLEDGE:
                _There(self, connection, link).acknowledge(frame, None)
            return
        if frame.place is not None:
            growth = self._begin_growth(connection, link, frame) if frame.flags & Flag.GROWING else None
            parcel = Parcel(frame, lease=_lease(connection, frame), growth=growth)
        elif arriving is not None and arriving.lease is not None:
            parcel = Parcel(frame, lease=arriving.lease)
        else:
            parcel = Parcel(frame, body)
        if any(frame.kinds):
            for kind, part in zip(frame.kinds, parcel.parts(keep=False), strict=True):
                self._host.devices.announce(kind, part)
        self._deliver(link, parcel, _There(self, connection, link))

    def _begin_growth(self, connection: Connection, link: Link, frame: Frame) -> Growth:
        host = self._host
        growth = Growth(frame.sizes[0], link.peer, connection, host.board, host.settings.timeout)
        growing, key = self._growing.setdefault(connection, {}), (frame.route, frame.sequence)
        growing[key] = growth
        if connection.closed:
            growing.pop(key, None)
            self._mourn(growth.fail, link, "the connection was closed")
        return growth

    def _grown(self, connection: Connection, frame: Frame) -> None:
        """More of a body is there, or never will be."""
        growing, key = self._growing.get(connection, {}), (frame.route, frame.sequence)
        growth = growing.get(key)
        if growth is None:
            raise ProtocolError("the other side says that a message has grown which it never sent")
        filled = read_grown(frame)
        if filled is None:
            growth.fail(PayloadError("the tensor was not sent to its end", why="its sender was interrupted"))
        else:
            growth.grown(filled)
            self.moved()
        if growth.error is not None or growth.complete:
            del growing[key]

    def _deliver(self, link: Link, parcel: Parcel, origin: Origin) -> None:
        frame = parcel.frame
        if not frame.tag:
            link.incoming.deliver(parcel, origin)
            return
        self._serve(link, parcel)

    def _serve(self, link: Link, parcel: Parcel) -> None:
        """Hand a message to its service."""
        frame = parcel.frame
        handler = self._handlers.get(frame.tag)
        if handler is None:
            parcel.release()
            _log.warning("`%s` sent `%s` a message for service %d, which is not here", link.peer, link.me, frame.tag)
            return
        try:
            handler(Delivery(link, parcel, frame.tag, frame.key, frame.weight))
        except Exception:  # noqa: BLE001 - who reads serves everybody: a fault in one service must not end the others
            _log.exception("service %d failed on a message from `%s`", frame.tag, link.peer)

    def _name_route(self, connection: Connection, frame: Frame) -> None:
        source, destination = json.loads(bytes(frame.head))
        link = self._host.link_by_names(destination, source)
        self._routes.setdefault(connection, {})[frame.route] = link
        self._host.bind(link, connection)

    def _link(self, connection: Connection, frame: Frame) -> Link:
        try:
            return self._routes[connection][frame.route]
        except KeyError:
            raise ProtocolError("the other side sent a message on a route that it never named") from None

    def _acknowledged(self, connection: Connection, frame: Frame) -> None:
        source, destination, sent, expected = json.loads(bytes(frame.head))
        _settle(self._host.link_by_names(source, destination), frame.sequence, sent, expected)

    # Holding back who sends faster than it is received

    def queued(self, connection: Connection, parcel: Parcel) -> None:
        with self._lock:
            connection.backlog += 1
            self._waiting_bytes += parcel.nbytes
            settings = self._host.settings
            full = connection.backlog > settings.inbox_messages or self._waiting_bytes > settings.inbox_bytes
        if full and not connection.paused:
            connection.paused = True
            self._host.hold_back(connection)

    def taken(self, connection: Connection, parcel: Parcel) -> None:
        with self._lock:
            connection.backlog -= 1
            self._waiting_bytes -= parcel.nbytes
            settings = self._host.settings
            roomy = connection.backlog * 2 < settings.inbox_messages and self._waiting_bytes * 2 < settings.inbox_bytes
        if connection.paused and roomy:
            connection.paused = False
            connection.arm()


class _There(Origin):
    """A parcel that came through a connection."""

    def __init__(self, dispatcher: Dispatcher, connection: Connection, link: Link) -> None:
        self._dispatcher = dispatcher
        self._connection = connection
        self._link = link

    def acknowledge(self, frame: Frame, mismatch: MismatchError | None) -> None:
        words = (None, None) if mismatch is None else (mismatch.sent, mismatch.expected)
        kind = Kind.ACCEPTED if mismatch is None else Kind.REFUSED
        # As the sender names the two: its own address first.
        head = json.dumps([self._link.peer, self._link.me, *words]).encode()
        self._connection.post(Frame(kind, sequence=frame.sequence, head=head).pack())

    def queued(self, parcel: Parcel) -> None:
        self._dispatcher.queued(self._connection, parcel)

    def taken(self, parcel: Parcel) -> None:
        self._dispatcher.taken(self._connection, parcel)


class _Here(Origin):
    """A parcel from another address of this process."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def acknowledge(self, frame: Frame, mismatch: MismatchError | None) -> None:
        sent, expected = (None, None) if mismatch is None else (mismatch.sent, mismatch.expected)
        _settle(self._link, frame.sequence, sent, expected)


def _settle(link: Link, sequence: int, sent: str | None, expected: str | None) -> None:
    """The receiver said what became of a message of this link."""
    error = None
    if sent is not None and expected is not None:
        error = MismatchError(sent, expected, where=f"{link.me} -> {link.peer}")
        # Its text only: a kept record would keep the error's traceback, and with that whatever was received.
        _log.warning("%s", str(error))
    link.outgoing.acknowledged(sequence, error)


def _lease(connection: Connection, frame: Frame) -> Lease:
    place = frame.place
    if place is None:
        raise ProtocolError("the frame has no place in shared memory")
    segment = connection.segments.get(place.segment)
    if frame.flags & Flag.DESCRIPTOR_FOLLOWS:
        fd = connection.take_fd()
        event = None if frame.flags & Flag.ONE_SHOT else connection.take_fd()
        if segment is None:
            segment = Segment(fd, place.segment, event, owns_event=True)
        else:
            # Two frames were under way when the sender learnt that the first had taken it along.
            os.close(fd)
            if event is not None:
                os.close(event)
        if not frame.flags & Flag.ONE_SHOT:
            connection.segments[place.segment] = segment
    if segment is None or place.offset + place.size > segment.size:
        raise ProtocolError("the other side refers to shared memory that it never passed on")
    return Lease(segment, place.offset, place.size, place.lease, bool(frame.flags & Flag.PRIVATE_COPY))
