"""The pairs of a local address and a remote one: how each is connected, and what becomes of it when that ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.connection_pool import ConnectionPool, UnreachableError
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.collective.peer_stream import PeerStream
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError, PeerNotFoundError, WorkerDiedError

_log = logging.getLogger(__name__)
# (peer, what happened to the connection) -> the error that its operations raise.
Explain = Callable[[str, str], Exception]


def died(peer: str, reason: str) -> Exception:
    """Return the error for a peer of whom nothing more is known."""
    return WorkerDiedError(peer, cause=reason)


class PeerStreams:
    """All streams of one endpoint, each made when first asked for.

    Args:
        connections: to other endpoints.
        info: of this one.
        connect_timeout: what the first contact with a peer may take, in seconds.
        explain: makes the error for a lost peer; it may block for a moment.
    """

    def __init__(
        self, connections: ConnectionPool, info: EndpointInfo, connect_timeout: float, explain: Explain
    ) -> None:
        self._connections = connections
        self._info = info
        self._connect_timeout = connect_timeout
        self.explain = explain
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, str], PeerStream] = {}
        self._lost_callbacks: list[Callable[[str, str], None]] = []

    def of(self, me: str, peer: str) -> PeerStream:
        """Return both directions between two addresses."""
        with self._lock:
            stream = self._streams.get((me, peer))
            if stream is None:
                stream = self._streams[me, peer] = PeerStream(me, peer)
            return stream

    def all(self) -> list[PeerStream]:
        with self._lock:
            return list(self._streams.values())

    def on_lost(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback(address, reason)` when the process of a peer is gone; it must not block."""
        self._lost_callbacks.append(callback)

    def connect(self, stream: PeerStream, work: Work[object]) -> Connection | None:
        """Return the stream's connection; None when the peer lives in this process."""
        connection = stream.outgoing.connection
        if connection is not None and not connection.closed:
            return connection
        if stream.incarnation == self._info.incarnation:
            return None
        if stream.resolver is None:
            raise PeerNotFoundError(stream.peer, f"`{stream.peer}` is not connected, and nothing tells where it is")
        deadline = min(work.deadline, time.monotonic() + self._connect_timeout)
        info = stream.resolver.lookup(WorkerAddress.from_name(stream.peer), deadline - time.monotonic())
        if info.incarnation == self._info.incarnation:
            stream.incarnation = info.incarnation
            return None
        try:
            connection = self._connections.connect(info, deadline)
        except UnreachableError as error:
            if error.gone:
                raise self.explain(stream.peer, error.why or error.message) from error
            why = f"{error.message}: {error.why}" if error.why else error.message
            if deadline == work.deadline:
                # It was given less time than a connection may take.
                raise CommunicationTimeoutError(work.title, work.seconds, picture=why) from error
            raise PeerNotFoundError(
                stream.peer,
                f"`{stream.peer}` could not be reached in {self._connect_timeout:g} s",
                why=why,
                help="check that the hosts reach each other, and RLINF_NET_IF where they have several networks",
            ) from error
        self.bind(stream, connection)
        return connection

    def bind(self, stream: PeerStream, connection: Connection) -> None:
        """Let the stream go through this connection from now on."""
        incarnation = connection.peer.incarnation
        if stream.incarnation not in (None, incarnation):
            dropped = stream.incoming.reset()
            if dropped:
                _log.warning("`%s` was launched anew: %d messages of its predecessor are dropped", stream.peer, dropped)
        stream.incarnation = incarnation
        current = stream.outgoing.connection
        if current is None or current.closed or current.peer.incarnation != incarnation:
            stream.outgoing.connection = connection

    def lost(self, connection: Connection, reason: str) -> None:
        """Fail what goes on through a connection that is over."""
        lost = [stream for stream in self.all() if stream.outgoing.connection is connection]
        for stream in lost:
            for callback in self._lost_callbacks:
                callback(stream.peer, reason)
        if any(stream.open_works() for stream in lost):
            # Not in this thread, which reads for everybody: the explanation may take a moment.
            threading.Thread(target=self._mourn, args=(lost, reason), name="rlinf-lost", daemon=True).start()

    def _mourn(self, streams: list[PeerStream], reason: str) -> None:
        """End the operations with a peer that is gone."""
        for stream in streams:
            works = stream.open_works()
            stream.outgoing.unacknowledged.clear()
            if works:
                error = self.explain(stream.peer, reason)
                for work in works:
                    work.fail(error)
