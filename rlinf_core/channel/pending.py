"""What this process has asked of channels and not heard of again."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from rlinf_core.channel import wire
from rlinf_core.channel.lane import Lane
from rlinf_core.channel.receipts import NO_SLOT, ReceiptPage
from rlinf_core.channel.request import Request, let_go
from rlinf_core.channel.wire import Ask, Farewell, Reply, Say
from rlinf_core.collective.dispatcher import Delivery
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.link import Link
from rlinf_core.collective.parcel import Parcel
from rlinf_core.errors import CommunicationTimeoutError
from rlinf_core.failures import PackedError

AnyRequest: TypeAlias = Request[Any]
# How often it is looked whether the time of an operation is up for which nobody waits.
_LOOK_EVERY = 0.25


class Pending:
    """The operations that go on, by ticket. Whoever takes one out settles it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tickets = itertools.count(1)
        self._open: dict[int, AnyRequest] = {}
        # What the other side was told to end, and has not said what became of.
        self._withdrawn: dict[int, AnyRequest] = {}
        # Where to sign for what comes through a link.
        self.pages: dict[Link, ReceiptPage] = {}
        # The last words of channels that have ended.
        self.farewells: dict[Link, Farewell] = {}
        self._watching = False
        self._lock = threading.Lock()
        endpoint.serve(wire.REPLIES, self._reply)

    def next_ticket(self) -> int:
        return next(self._tickets)

    def add(self, request: AnyRequest, *, detached: bool) -> None:
        """Waits for replies to a request; one that is `detached` ends at its deadline although nobody waits for it."""
        self._open[request.ticket] = request
        if detached and not self._watching:
            self._watch()

    def withdraw(self, request: AnyRequest) -> bool:
        """Takes an operation out that shall end; False when it has ended."""
        if self._open.pop(request.ticket, None) is None:
            return False
        self._withdrawn[request.ticket] = request
        return True

    def forget(self, request: AnyRequest) -> None:
        """The other side was never told of a request, or of its end."""
        self._open.pop(request.ticket, None)
        self._withdrawn.pop(request.ticket, None)

    def take_all(self, channel: str) -> list[AnyRequest]:
        """Takes out what goes on with one channel."""
        taken: list[AnyRequest] = []
        for requests in (self._open, self._withdrawn):
            for ticket, request in requests.copy().items():
                if request.target == channel and requests.pop(ticket, None) is not None:
                    taken.append(request)
        return taken

    # What brokers say; in the thread that reads

    def _reply(self, delivery: Delivery) -> None:
        reply = wire.unpack_reply(delivery.key)
        say, ticket = reply.say, reply.ticket
        head = delivery.parcel.frame.head
        if say == Say.ACCEPTED:
            self._accepted(wire.unpack_tickets(head) if head else (ticket,))
        elif say == Say.ITEM:
            request = self._open.pop(ticket, None)
            if request is not None:
                self._taken(request, delivery, reply, (head,))
        elif say == Say.LARGE:
            self._some(delivery, reply, [delivery.parcel])
        elif say == Say.ITEMS:
            self._some(delivery, reply, wire.unpack_items(head))
        elif say == Say.ENDED:
            self.farewells[delivery.link] = cast("Farewell", pickle.loads(head))  # noqa: S301 - the peer is authenticated
        else:
            request = self._take(ticket)
            if request is not None:
                _end(request, reply, head)

    def _accepted(self, tickets: tuple[int, ...]) -> None:
        lanes: dict[Lane, list[int]] = {}
        for ticket in tickets:
            request = self._take(ticket)
            if request is not None:
                request.finish(None)
                lane = request.lane
                if lane is not None:
                    lanes.setdefault(lane, []).append(ticket)
        for lane, ended in lanes.items():
            lane.ended(ended)

    def _take(self, ticket: int) -> AnyRequest | None:
        request = self._open.pop(ticket, None)
        return self._withdrawn.pop(ticket, None) if request is None else request

    def _some(self, delivery: Delivery, reply: Reply, pieces: list[bytes] | list[Parcel]) -> None:
        request = self._open.get(reply.ticket)
        if request is None:
            let_go(pieces)  # it was withdrawn
        elif request.add(reply.place, reply.total, pieces):
            if self._open.pop(reply.ticket, None) is None:
                let_go(pieces)
            else:
                self._taken(request, delivery, reply, request.pieces)

    def _taken(self, request: AnyRequest, delivery: Delivery, reply: Reply, pieces: Sequence[object]) -> None:
        """Tells that the items are here, before their consumer sees them: they can not go to another one any more."""
        if not request.claim():
            # It was given up at this very moment, and found itself taken out already.
            let_go(pieces)
            self._endpoint.post(delivery.link, wire.REQUESTS, wire.pack_request(Ask.CANCEL, reply.ticket))
            return
        self._sign(delivery, reply)
        request.arrive(pieces)

    def _sign(self, delivery: Delivery, reply: Reply) -> None:
        if reply.slot != NO_SLOT:
            self.pages[delivery.link].sign(reply.slot, reply.ticket)
        else:
            self._endpoint.post(delivery.link, wire.REQUESTS, wire.pack_request(Ask.TAKEN, reply.ticket))

    # Deadlines

    def _watch(self) -> None:
        with self._lock:
            if self._watching:
                return
            self._watching = True
        threading.Thread(target=self._look_after, name="rlinf-channel-deadlines", daemon=True).start()

    def _look_after(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_LOOK_EVERY)
            now = time.monotonic()
            for request in list(self._open.copy().values()):
                # Whoever waits for one ends it to the millisecond, and with a picture of who waits for whom.
                if now >= request.deadline + _LOOK_EVERY:
                    request.give_up(CommunicationTimeoutError(request.operation, request.seconds))
            with self._lock:
                if not self._open:
                    self._watching = False
                    return


def _end(request: AnyRequest, reply: Reply, head: bytes | bytearray) -> None:
    if reply.say == Say.REFUSED:
        request.refuse(wire.REASONS[reply.place], head.decode())
    elif reply.say == Say.FAILED:
        packed = cast("PackedError", pickle.loads(head))  # noqa: S301 - the peer is authenticated
        request.fail(packed.unpack())
    else:
        request.arrive((head,))
    if request.lane is not None:
        request.lane.ended((request.ticket,))
