"""Passing on what has arrived, as a channel does: without a copy where both sides share memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum

from rlinf_core.collective.connection import Connection
from rlinf_core.collective.courier import Courier
from rlinf_core.collective.forwards import Forwards
from rlinf_core.collective.frame import Flag, Kind, SharedPlace
from rlinf_core.collective.link import Link
from rlinf_core.collective.parcel import Parcel
from rlinf_core.collective.payload import HostPart
from rlinf_core.collective.transports.base import Announced, Bytes, Cargo, Message
from rlinf_core.collective.transports.shared_memory import descriptors
from rlinf_core.collective.work import Work

# What of a parcel's flags is still true when it travels on.
_LASTING = Flag.HEAD_IN_BODY | Flag.TENSOR


class Handover(Enum):
    """What becomes of a parcel that is passed on."""

    GIVE = "give"  # it is the other side's
    LEND = "lend"  # it is the other side's once `concede` is called; until then it can be passed on anew
    COPY = "copy"  # it stays, and the other side gets a copy


class Relay:
    """Sends parcels on.

    Attributes:
        forwards: what was passed on and has not been heard of again.
    """

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self.forwards = Forwards()

    def forward(
        self,
        link: Link,
        parcel: Parcel,
        work: Work[object],
        handover: Handover,
        *,
        tag: int,
        key: bytes,
        weight: float,
    ) -> None:
        """Pass a parcel on in the background; `work` finishes when that is done."""
        message = _outline(parcel, tag=tag, key=key, weight=weight)

        def at_once() -> bool:
            connection = self._courier.ready_connection(link)
            cargo = None if connection is None else self._pass_on(parcel, connection, message, handover)
            if connection is None or cargo is None:
                return False
            with self._handing_over(parcel, connection, cargo, handover) as handed:
                handed.done = self._courier.write_now(link, connection, message, cargo, None)
            return handed.done

        try:
            if link.outgoing.run_at_once(at_once):
                work.finish(None)
                return
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            work.fail(error)
            return
        link.outgoing.queue(lambda: self._forward(link, parcel, message, work, handover), work)

    def concede(self, link: Link, parcel: Parcel) -> None:
        """The other side has taken what was lent to it: the parcel is its own now, and nothing of it remains here."""
        lease = parcel.take_lease()
        connection = link.outgoing.connection
        if lease is None or connection is None:
            return
        if lease.forwarded:
            self.forwards.remember(lease, connection)
        else:
            lease.release()

    def _forward(self, link: Link, parcel: Parcel, message: Message, work: Work[object], handover: Handover) -> None:
        connection = self._courier.connect(link, work)
        if connection is None and handover is Handover.GIVE:
            self._courier.hand_over(
                link, Parcel(message.frame(Kind.MESSAGE, 0, 0, Cargo()), parcel.body(), parcel.take_lease())
            )
            return
        cargo = None if connection is None else self._pass_on(parcel, connection, message, handover)
        if connection is not None and cargo is not None:
            with self._handing_over(parcel, connection, cargo, handover) as handed:
                self._courier.write(link, connection, message, cargo, work, None)
                handed.done = True
            return
        message.parts = [
            HostPart(view, kind) for view, kind in zip(parcel.parts(keep=False), parcel.frame.kinds, strict=True)
        ]
        self._courier.transmit(link, message, work, None)
        if handover is Handover.GIVE:
            parcel.release()

    def _pass_on(self, parcel: Parcel, connection: Connection, message: Message, handover: Handover) -> Cargo | None:
        """Return the parcel's body as cargo where it needs no copy, else None."""
        frame, lease = parcel.frame, parcel.lease
        if lease is None and frame.body_size <= self._courier.limit:
            body: list[Bytes] = [parcel.body()] if frame.body_size else []
            return Cargo(body=body, body_size=frame.body_size)
        if lease is None or lease.private or handover is Handover.COPY or not connection.shares_memory:
            return None
        segment = lease.segment
        flags = Flag.SHARED | Flag.ONE_SHOT if segment.passes_once else Flag.SHARED
        place = SharedPlace(segment.identity, lease.offset, lease.size, lease.index)
        return Cargo(flags, place, fds=descriptors(segment))

    @contextmanager
    def _handing_over(
        self, parcel: Parcel, connection: Connection, cargo: Cargo, handover: Handover
    ) -> Generator[_Handed, None, None]:
        """The other side's from before it hears of it, for it may give it back at once."""
        handed = _Handed()
        lease = parcel.lease if cargo.place is not None else None
        if lease is not None:
            lease.forward(self.forwards.mark)
        try:
            yield handed
        finally:
            if handed.done:
                if handover is Handover.GIVE:
                    parcel.take_lease()
                    if lease is not None:
                        self.forwards.remember(lease, connection)
            elif lease is not None:
                lease.keep()


class _Handed:
    """Whether a frame has left."""

    done = False


def _outline(parcel: Parcel, *, tag: int, key: bytes, weight: float) -> Message:
    """Return a message that says what the parcel holds, whose bytes are added, or lie in the cargo already."""
    frame = parcel.frame
    parts = [Announced(size, kind) for size, kind in zip(frame.sizes, frame.kinds, strict=True)]
    return Message(frame.head, parts, frame.flags & _LASTING, tag, key, weight)
