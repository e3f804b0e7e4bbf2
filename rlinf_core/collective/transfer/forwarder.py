"""Forwarding of received messages, as a channel does: without a copy where both sides share memory."""

from __future__ import annotations

import random
import threading

from rlinf_core.collective.arena import BlockLease, LeaseState
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.frame import Flag, HostPart
from rlinf_core.collective.message import Bytes, EncodedBody, Message
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.collective.transfer.sender import Sender, shared_body
from rlinf_core.collective.work import Work

# The table of leases is swept when it reaches this size plus twice its size after the previous sweep.
_SWEEP_AT = 4096


# The flags of a message that remain valid when it is forwarded.
_LASTING = Flag.HEAD_IN_BODY | Flag.TENSOR


class Forwarder:
    """The part of an endpoint that forwards received messages.

    A lent message belongs to the peer once `release_lent` is called; until then it can be forwarded again. A message
    that is not lent reaches the peer as a copy. The forwarder keeps the leases that were handed over and not released
    yet: if their holder dies, this process releases them.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        # The state that marks the leases forwarded by this process, as opposed to those forwarded by other processes.
        self._mark = random.randint(LeaseState.FIRST_MARK, 255)
        self._lock = threading.Lock()
        # By segment and lease index. An index is reused: the entry of the latest receiver replaces earlier ones.
        self._held: dict[tuple[int, int], tuple[BlockLease, Connection]] = {}
        self._departed: set[Connection] = set()
        self._sweep_at = _SWEEP_AT

    def forward(
        self,
        stream: PeerStream,
        received: ReceivedMessage,
        work: Work[object],
        *,
        tag: int,
        lend: bool,
        key: bytes = b"",
        to: str | None = None,
    ) -> None:
        """Forward a received message in the background; a lent one without a copy where both sides share memory.

        If the endpoint `to` was relaunched, `work` fails.
        """
        self._sender.check_open()
        frame = received.frame
        message = Message(frame.head, (), frame.flags & _LASTING, tag, key, to=to)
        message.sizes = frame.sizes

        def at_once() -> bool:
            connection = self._sender.ready_connection(stream)
            body = None if connection is None else self._pass_on(received, connection, lend)
            if connection is None or body is None:
                return False
            return self._hand_over(stream, received, connection, message, body, None)

        def in_turn() -> None:
            connection = self._sender.connect(stream, work)
            body = None if connection is None else self._pass_on(received, connection, lend)
            if connection is not None and body is not None:
                self._hand_over(stream, received, connection, message, body, work)
            else:
                message.parts = [HostPart(view) for view in received.parts(keep=False)]
                self._sender.transmit(stream, message, work)

        stream.start(at_once, in_turn, work)

    def release_lent(self, stream: PeerStream, received: ReceivedMessage) -> None:
        """Hand a lent message over to the peer, which has acknowledged it."""
        lease = received.take_lease()
        connection = stream.connection
        if lease is None or connection is None:
            return
        if not lease.released:
            lease.release()
            return
        with self._lock:
            self._held[lease.segment.identity, lease.index] = (lease, connection)
            if connection.closed:
                self._departed.add(connection)
            if len(self._held) >= self._sweep_at:
                self._sweep()

    def lost(self, connection: Connection) -> None:
        """Release the leases held by the peer of an ended connection, once its process is dead."""
        with self._lock:
            self._departed.add(connection)
        self.collect()

    def collect(self) -> None:
        """Release the leases of dead processes; a process that only disconnected may still use its leases."""
        with self._lock:
            # A released lease in the table keeps its owner's memory mapped needlessly.
            self._sweep()
            if not self._departed:
                return
            still_held = {connection for _, connection in self._held.values()}
            dead = {connection for connection in self._departed if connection.peer_is_dead()}
            for lease, holder in self._held.values():
                if holder in dead:
                    lease.reclaim(self._mark)
            self._held = {key: held for key, held in self._held.items() if held[1] not in dead}
            self._departed = (self._departed & still_held) - dead

    def outstanding(self) -> bool:
        """Return whether a receiver still holds memory that this process must release if the receiver dies."""
        with self._lock:
            self._sweep()
            return bool(self._held)

    def _sweep(self) -> None:
        self._held = {key: held for key, held in self._held.items() if held[0].forwarded_by(self._mark)}
        self._sweep_at = 2 * len(self._held) + _SWEEP_AT

    def _pass_on(self, received: ReceivedMessage, connection: Connection, lend: bool) -> EncodedBody | None:
        """Return the encoded body of a received message if it needs no copy, else None."""
        frame, lease = received.frame, received.lease
        if lease is None and frame.body_size <= self._sender.limit:
            buffers: list[Bytes] = [received.body()] if frame.body_size else []
            return EncodedBody(buffers=buffers, size=frame.body_size)
        if lease is None or lease.private or not lend or not connection.shares_memory:
            return None
        return shared_body(lease)

    def _hand_over(
        self,
        stream: PeerStream,
        received: ReceivedMessage,
        connection: Connection,
        message: Message,
        body: EncodedBody,
        work: Work[object] | None,
    ) -> bool:
        """Write the frame; first mark the lease as forwarded, since the peer may release it at once."""
        lease = received.lease if body.place is not None else None
        if lease is not None:
            lease.forward(self._mark)
        done = False
        try:
            done = self._sender.write(stream, connection, message, body, work)
        finally:
            if not done and lease is not None:
                lease.keep()
        return done
