"""The streams of one endpoint: their connections, and the failure of operations when a connection or peer is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.connection_pool import ConnectionPool, UnreachableError
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.collective.transfer.peer_stream import RELAUNCHED, PeerStream
from rlinf_core.collective.transfer.received_messages import Backlog
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError, PeerNotFoundError, WorkerDiedError

_log = logging.getLogger(__name__)
# (peer, why the connection ended) -> the error that operations with the peer raise.
Explain = Callable[[str, str], Exception]


def died(peer: str, reason: str) -> Exception:
    """Return the error for a peer that was lost for an unknown reason."""
    return WorkerDiedError(peer, cause=reason)


class PeerStreams:
    """The streams of one endpoint, each made on first use; `explain` may block for a moment."""

    def __init__(
        self,
        connections: ConnectionPool,
        info: EndpointInfo,
        connect_timeout: float,
        explain: Explain,
        backlog: Backlog,
    ) -> None:
        self._connections = connections
        self._info = info
        self._connect_timeout = connect_timeout
        self.explain = explain
        self._backlog = backlog
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, str], PeerStream] = {}
        # By the incarnation of the peer's endpoint.
        self._with: dict[str, list[PeerStream]] = {}
        self._lost_callbacks: list[Callable[[str, str], None]] = []

    def of(self, me: str, peer: str) -> PeerStream:
        with self._lock:
            stream = self._streams.get((me, peer))
            if stream is None:
                stream = self._streams[me, peer] = PeerStream(me, peer)
            return stream

    def all(self) -> list[PeerStream]:
        with self._lock:
            return list(self._streams.values())

    def with_peer_of(self, connection: Connection) -> list[PeerStream]:
        """Return the streams to addresses of the endpoint at the other end of a connection."""
        with self._lock:
            return list(self._with.get(connection.peer.incarnation, ()))

    def are_awaited_through(self, connection: Connection, waiting: Container[Work[Any]]) -> bool:
        """Return whether any stream awaits a message through a connection, see `PeerStream.is_awaited_through`."""
        return any(stream.is_awaited_through(connection, waiting) for stream in self.with_peer_of(connection))

    def on_lost(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback(address, reason)` when the process of a peer is gone; `callback` must not block."""
        self._lost_callbacks.append(callback)

    def connect(self, stream: PeerStream, work: Work[object]) -> Connection | None:
        """Return the stream's connection; None when the peer lives in this process."""
        connection = stream.connection
        if connection is not None and connection.usable:
            return connection
        if stream.incarnation == self._info.incarnation:
            return None
        if stream.resolver is None:
            raise PeerNotFoundError(stream.peer, f"`{stream.peer}` is not connected, and its address is unknown")
        deadline = min(work.deadline, time.monotonic() + self._connect_timeout)
        info = stream.resolver.lookup(WorkerAddress.from_name(stream.peer), deadline - time.monotonic())
        if info.incarnation == self._info.incarnation:
            self._index(stream, info.incarnation)
            return None
        try:
            connection = self._connections.connect(info, deadline)
        except UnreachableError as error:
            if error.gone:
                raise self.explain(stream.peer, error.why or error.message) from error
            why = f"{error.message}: {error.why}" if error.why else error.message
            if deadline == work.deadline:
                # The operation's own timeout is shorter than the connection timeout.
                raise CommunicationTimeoutError(work.title, work.seconds, picture=why) from error
            raise PeerNotFoundError(
                stream.peer,
                f"`{stream.peer}` could not be reached in {self._connect_timeout:g} s",
                why=why,
                help="check that the hosts reach each other, and RLINF_NET_IF where they have several networks; allow"
                " more seconds by RLINF_CONNECT_TIMEOUT where they are very busy",
            ) from error
        self.bind(stream, connection)
        # The reading thread may have bound a connection that the peer dialed: all messages must use the same one.
        bound = stream.connection
        return bound if bound is not None and bound.usable else connection

    def bind(self, stream: PeerStream, connection: Connection) -> None:
        incarnation = connection.peer.incarnation
        # A connecting and a reading thread may both find a successor: the second must not drop its messages.
        with stream.binding:
            if incarnation in stream.former:
                return
            current = stream.connection
            if stream.incarnation is not None and stream.incarnation != incarnation:
                if connection.hung_up() and current is not None and not current.hung_up():
                    # The first message of a dead process may be read after that of its successor.
                    stream.former.add(incarnation)
                    return
                self._end_predecessor(stream, stream.incarnation)
            if stream.incarnation != incarnation:
                self._index(stream, incarnation)
            # Messages sent through a replaced connection, whose end is not read yet, would be lost.
            if current is None or not current.usable or current.peer.incarnation != incarnation:
                stream.connection = connection

    def _end_predecessor(self, stream: PeerStream, incarnation: str) -> None:
        """Drop the messages of a relaunched peer's predecessor, and fail the sends to it: `lost` no longer does."""
        stream.former.add(incarnation)
        stale = stream.clear_inbox()
        for received in stale:
            self._backlog.taken(received)
            received.release()
        if stale:
            _log.warning("`%s` was relaunched: %d messages of its predecessor are dropped", stream.peer, len(stale))
        if stream.connection is not stream.ended:
            self._tell(stream, RELAUNCHED)
        self._fail_later(
            stream, stream.take_unacknowledged(lambda one: one.peer.incarnation in stream.former), RELAUNCHED
        )

    def _index(self, stream: PeerStream, incarnation: str) -> None:
        with self._lock:
            if stream.incarnation is not None:
                rest = [other for other in self._with.pop(stream.incarnation, ()) if other is not stream]
                if rest:
                    self._with[stream.incarnation] = rest
            self._with.setdefault(incarnation, []).append(stream)
            stream.incarnation = incarnation
        # A receive of this stream may wait for a message of the connection, so paused reading must resume.
        self._backlog.stir(incarnation)

    def lost(self, connection: Connection, reason: str) -> None:
        """Fail the sends through a lost connection, and all operations with its peer if that has no other one."""
        for stream in self.with_peer_of(connection):
            with stream.binding:
                works = stream.take_unacknowledged(lambda one: one is connection)
                if stream.connection is connection:
                    # If the peer has another connection, its loss is reported when that one ends.
                    present = self._connections.get(connection.peer.incarnation)
                    if present is not None:
                        stream.connection = present
                    else:
                        works += stream.open_works()
                        stream.ended = connection
                        self._tell(stream, reason)
            self._fail_later(stream, works, reason)

    def _tell(self, stream: PeerStream, reason: str) -> None:
        for callback in self._lost_callbacks:
            callback(stream.peer, reason)

    def sent(self, stream: PeerStream, sequence: int, work: Work[None], connection: Connection) -> None:
        """Record a message that is about to be sent and is to be acknowledged."""
        stream.unacknowledged[sequence] = work, connection
        # A caller may wait for the acknowledgement already.
        self._backlog.stir(connection.peer.incarnation)
        if connection.peer.incarnation in stream.former:
            self._fail_later(stream, stream.take_unacknowledged(lambda one: one is connection), RELAUNCHED)

    def look_for_acknowledgement(self, work: Work[Any]) -> None:
        """Wake the paused reading threads that may receive the acknowledgement that a caller now waits for."""
        if not self._backlog.holds_back:
            return
        for stream in self.all():
            if stream.peer == work.target and work in stream.unacknowledged_works() and stream.incarnation:
                self._backlog.stir(stream.incarnation)

    def _fail_later(self, stream: PeerStream, works: Sequence[Work[object]], reason: str) -> None:
        def fail(error: Exception) -> None:
            for work in works:
                work.fail(error)

        if works:
            self.explain_later(stream.peer, reason, fail)

    def explain_later(self, peer: str, reason: str, then: Callable[[Exception], object]) -> None:
        """Call `then` with the error for a lost peer, in a new thread: `explain` would block the reading thread."""
        threading.Thread(target=lambda: then(self.explain(peer, reason)), name="rlinf-lost-peer", daemon=True).start()
