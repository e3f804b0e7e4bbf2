"""The pairs of a local address and a remote one: how each is connected, and what becomes of it when that ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.card import AddressCard
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.connections import Connections, UnreachableError
from rlinf_core.collective.link import Link
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError, PeerNotFoundError, WorkerDiedError

_log = logging.getLogger(__name__)
# (peer, what happened to the connection) -> the error that its operations raise.
Explain = Callable[[str, str], Exception]


def died(peer: str, reason: str) -> Exception:
    """Return the error for a peer of whom nothing more is known."""
    return WorkerDiedError(peer, cause=reason)


class Links:
    """All links of one endpoint, each made when first asked for.

    Args:
        connections: to other endpoints.
        card: of this one.
        connect_timeout: what the first contact with a peer may take, in seconds.
        explain: makes the error for a lost peer; it may block for a moment.
    """

    def __init__(self, connections: Connections, card: AddressCard, connect_timeout: float, explain: Explain) -> None:
        self._connections = connections
        self._card = card
        self._connect_timeout = connect_timeout
        self.explain = explain
        self._lock = threading.Lock()
        self._links: dict[tuple[str, str], Link] = {}
        self._lost_callbacks: list[Callable[[str, str], None]] = []

    def of(self, me: str, peer: str) -> Link:
        """Return both directions between two addresses."""
        with self._lock:
            link = self._links.get((me, peer))
            if link is None:
                link = self._links[me, peer] = Link(me, peer)
            return link

    def all(self) -> list[Link]:
        with self._lock:
            return list(self._links.values())

    def on_lost(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback(address, reason)` when the process of a peer is gone; it must not block."""
        self._lost_callbacks.append(callback)

    def connect(self, link: Link, work: Work[object]) -> Connection | None:
        """Return the link's connection; None when the peer lives in this process."""
        connection = link.outgoing.connection
        if connection is not None and not connection.closed:
            return connection
        if link.incarnation == self._card.incarnation:
            return None
        if link.connector is None:
            raise PeerNotFoundError(link.peer, f"`{link.peer}` is not connected, and nothing tells where it is")
        deadline = min(work.deadline, time.monotonic() + self._connect_timeout)
        card = link.connector.lookup(WorkerAddress.from_name(link.peer), deadline - time.monotonic())
        if card.incarnation == self._card.incarnation:
            link.incarnation = card.incarnation
            return None
        try:
            connection = self._connections.connect(card, deadline)
        except UnreachableError as error:
            if error.gone:
                raise self.explain(link.peer, error.why or error.message) from error
            why = f"{error.message}: {error.why}" if error.why else error.message
            if deadline == work.deadline:
                # It was given less time than a connection may take.
                raise CommunicationTimeoutError(work.operation, work.seconds, picture=why) from error
            raise PeerNotFoundError(
                link.peer,
                f"`{link.peer}` could not be reached in {self._connect_timeout:g} s",
                why=why,
                help="check that the hosts reach each other, and RLINF_NET_IF where they have several networks",
            ) from error
        self.bind(link, connection)
        return connection

    def bind(self, link: Link, connection: Connection) -> None:
        """The link goes through this connection from now on."""
        incarnation = connection.peer.incarnation
        if link.incarnation not in (None, incarnation):
            dropped = link.incoming.reset()
            if dropped:
                _log.warning("`%s` was launched anew: %d messages of its predecessor are dropped", link.peer, dropped)
        link.incarnation = incarnation
        current = link.outgoing.connection
        if current is None or current.closed or current.peer.incarnation != incarnation:
            link.outgoing.connection = connection

    def lost(self, connection: Connection, reason: str) -> None:
        """A connection is over: what goes on through it fails."""
        lost = [link for link in self.all() if link.outgoing.connection is connection]
        for link in lost:
            for callback in self._lost_callbacks:
                callback(link.peer, reason)
        if any(link.open_works() for link in lost):
            # Not in this thread, which reads for everybody: the explanation may take a moment.
            threading.Thread(target=self._mourn, args=(lost, reason), name="rlinf-lost", daemon=True).start()

    def _mourn(self, links: list[Link], reason: str) -> None:
        """End the operations with a peer that is gone."""
        for link in links:
            works = link.open_works()
            link.outgoing.unacknowledged.clear()
            if works:
                error = self.explain(link.peer, reason)
                for work in works:
                    work.fail(error)
