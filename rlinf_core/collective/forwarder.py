"""Passing on what has arrived, as a channel does: without a copy where both sides share memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum

from rlinf_core.collective.connection import Connection
from rlinf_core.collective.forwarded_leases import ForwardedLeases
from rlinf_core.collective.frame import Flag, FrameKind, SharedPlace
from rlinf_core.collective.message import Bytes, EncodedBody, Message, PlaceholderPart
from rlinf_core.collective.payload import HostPart
from rlinf_core.collective.peer_stream import PeerStream
from rlinf_core.collective.received_message import ReceivedMessage
from rlinf_core.collective.sender import Sender
from rlinf_core.collective.shared_memory import descriptors
from rlinf_core.collective.work import Work

# What of a received's flags is still true when it travels on.
_LASTING = Flag.HEAD_IN_BODY | Flag.TENSOR


class ForwardMode(Enum):
    """The treatment of a received message that is passed on."""

    MOVE = "give"  # it is the other side's
    LEND = "lend"  # it is the other side's once `release_lent` is called; until then it can be passed on anew
    COPY = "copy"  # it stays, and the other side gets a copy


class Forwarder:
    """Sends parcels on.

    Attributes:
        forwards: what was passed on and has not been heard of again.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.forwards = ForwardedLeases()

    def forward(
        self,
        stream: PeerStream,
        received: ReceivedMessage,
        work: Work[object],
        handover: ForwardMode,
        *,
        tag: int,
        key: bytes,
        weight: float,
    ) -> None:
        """Pass a received on in the background; `work` finishes when that is done."""
        message = _outline(received, tag=tag, key=key, weight=weight)

        def at_once() -> bool:
            connection = self._sender.ready_connection(stream)
            body = None if connection is None else self._pass_on(received, connection, message, handover)
            if connection is None or body is None:
                return False
            with self._handing_over(received, connection, body, handover) as handed:
                handed.done = self._sender.write_now(stream, connection, message, body, None)
            return handed.done

        try:
            if stream.outgoing.run_at_once(at_once):
                work.finish(None)
                return
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            work.fail(error)
            return
        stream.outgoing.queue(lambda: self._forward(stream, received, message, work, handover), work)

    def release_lent(self, stream: PeerStream, received: ReceivedMessage) -> None:
        """Release what the other side has taken: it is its own now, and nothing of it remains here."""
        lease = received.take_lease()
        connection = stream.outgoing.connection
        if lease is None or connection is None:
            return
        if lease.forwarded:
            self.forwards.remember(lease, connection)
        else:
            lease.release()

    def _forward(
        self, stream: PeerStream, received: ReceivedMessage, message: Message, work: Work[object], handover: ForwardMode
    ) -> None:
        connection = self._sender.connect(stream, work)
        if connection is None and handover is ForwardMode.MOVE:
            self._sender.hand_over(
                stream,
                ReceivedMessage(
                    message.frame(FrameKind.MESSAGE, 0, 0, EncodedBody()), received.body(), received.take_lease()
                ),
            )
            return
        body = None if connection is None else self._pass_on(received, connection, message, handover)
        if connection is not None and body is not None:
            with self._handing_over(received, connection, body, handover) as handed:
                self._sender.write(stream, connection, message, body, work, None)
                handed.done = True
            return
        message.parts = [
            HostPart(view, kind) for view, kind in zip(received.parts(keep=False), received.frame.kinds, strict=True)
        ]
        self._sender.transmit(stream, message, work, None)
        if handover is ForwardMode.MOVE:
            received.release()

    def _pass_on(
        self, received: ReceivedMessage, connection: Connection, message: Message, handover: ForwardMode
    ) -> EncodedBody | None:
        """Return the received's body as body where it needs no copy, else None."""
        frame, lease = received.frame, received.lease
        if lease is None and frame.body_size <= self._sender.limit:
            buffers: list[Bytes] = [received.body()] if frame.body_size else []
            return EncodedBody(buffers=buffers, size=frame.body_size)
        if lease is None or lease.private or handover is ForwardMode.COPY or not connection.shares_memory:
            return None
        segment = lease.segment
        flags = Flag.SHARED | Flag.ONE_SHOT if segment.passes_once else Flag.SHARED
        place = SharedPlace(segment.identity, lease.offset, lease.size, lease.index)
        return EncodedBody(flags, place, fds=descriptors(segment))

    @contextmanager
    def _handing_over(
        self, received: ReceivedMessage, connection: Connection, body: EncodedBody, handover: ForwardMode
    ) -> Generator[_Handed, None, None]:
        """Count it as the other side's before that hears of it, for it may give it back at once."""
        handed = _Handed()
        lease = received.lease if body.place is not None else None
        if lease is not None:
            lease.forward(self.forwards.mark)
        try:
            yield handed
        finally:
            if handed.done:
                if handover is ForwardMode.MOVE:
                    received.take_lease()
                    if lease is not None:
                        self.forwards.remember(lease, connection)
            elif lease is not None:
                lease.keep()


class _Handed:
    """A mark that a frame has left."""

    done = False


def _outline(received: ReceivedMessage, *, tag: int, key: bytes, weight: float) -> Message:
    """Return a message that says what the received holds, whose bytes are added, or lie in the body already."""
    frame = received.frame
    parts = [PlaceholderPart(size, kind) for size, kind in zip(frame.sizes, frame.kinds, strict=True)]
    return Message(frame.head, parts, frame.flags & _LASTING, tag, key, weight)
