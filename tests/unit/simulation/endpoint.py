"""The endpoint of a service in a simulated world: its receiver and its streams are the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rlinf_core.collective.endpoint_info import Settings
from rlinf_core.collective.frame import Frame, FrameKind
from rlinf_core.collective.message import Message
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.peer_streams import PeerStreams
from rlinf_core.collective.transfer.received_messages import Backlog
from rlinf_core.collective.transfer.receiver import Handler, Receiver
from rlinf_core.collective.work import WaitTable
from rlinf_core.errors import WorkerDiedError
from tests.unit.simulation.world import Wire, World

_WAITS = WaitTable()
_SETTINGS = Settings()


class Connection:
    """The service's end of a connection with one life of a process."""

    def __init__(self, incarnation: str, to_peer: Wire) -> None:
        self.peer = self
        self.incarnation = incarnation
        self.to_peer = to_peer
        self.closed = self.ended = self.peer_closing = self.replaced = False
        self.segments: dict[int, Any] = {}

    @property
    def usable(self) -> bool:
        return not self.closed

    def hung_up(self) -> bool:
        return self.closed or self.ended


class Peer:
    """The other end of a connection.

    Attributes:
        there: the wire to the service.
    """

    def __init__(self, connection: Connection, there: Wire) -> None:
        self.there = there
        self._connection = connection

    def die(self) -> None:
        """End it: what it sent still arrives, or is lost, and then the end of the connection does."""
        self._connection.ended = True
        self._connection.to_peer.lose()
        if self.there.world.chance(0.3):
            self.there.lose()
        self.there.send(None)


class ServiceEndpoint:
    """What a broker uses of an `Endpoint`."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.settings = _SETTINGS
        unused: Any = None
        backlog = Backlog(_SETTINGS)
        pool: Any = SimpleNamespace(get=lambda incarnation: None)
        self._streams = PeerStreams(
            pool, unused, 1.0, lambda peer, reason: WorkerDiedError(peer, cause=reason), backlog
        )
        self._receiver = Receiver(_SETTINGS, unused, _WAITS, self._streams, backlog, unused)
        self.on_peer_lost = self._streams.on_lost

    def serve(self, tag: int, handler: Handler) -> None:
        def guarded(*delivery: Any) -> None:
            # A real receiver logs what a service raises; here that is a finding.
            try:
                handler(*delivery)
            except Exception as error:
                self.world.check(False, "the service raised", repr(error))

        self._receiver.serve(tag, guarded)

    def connect(self, name: str, incarnation: str, receive: Callable[[Any], object]) -> Peer:
        """Return a process that has just connected."""
        back = Wire(self.world, receive)
        connection: Any = Connection(incarnation, back)

        def arrived(frame: Frame | None) -> None:
            if frame is None:
                connection.closed = True
                self._streams.lost(connection, "its connection ended")
            elif not connection.closed:
                self._receiver.arrived(connection, frame)

        there = Wire(self.world, arrived)
        there.send(Frame(FrameKind.ROUTE, route=1, head=json.dumps([name, self.name]).encode()))
        return Peer(connection, there)

    def post(
        self,
        stream: PeerStream,
        tag: int,
        key: bytes,
        head: bytes | bytearray = b"",
        weight: float = 0,
        *,
        to: str | None = None,
    ) -> bool:
        connection: Any = stream.connection
        if connection is None or connection.closed:
            return False
        if to not in (None, connection.incarnation):
            return True
        connection.to_peer.send((key, bytes(head)))
        return True

    def send_async(self, stream: PeerStream, message: Message, work: object) -> None:
        """Nobody can be reached who has no connection."""

    def explain_later(self, peer: str, reason: str, then: Callable[[Exception], object]) -> None:
        self.world.soon(then, WorkerDiedError(peer, cause=reason), within=0.6)

    def release_lent(self, stream: PeerStream, received: object) -> None:
        raise AssertionError("only packed items are put")

    def answers_for_memory(self) -> bool:
        return False

    def collect(self) -> None:
        pass
