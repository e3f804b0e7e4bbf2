"""What this process has asked of channels and not heard of again."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from rlinf_core import spans
from rlinf_core.channel import wire
from rlinf_core.channel.boxes import LARGEST, TICKETS
from rlinf_core.channel.deadlines import Deadlines
from rlinf_core.channel.lane import Lane
from rlinf_core.channel.page import ClientPage
from rlinf_core.channel.receipts import NO_SLOT
from rlinf_core.channel.request import Request, let_go
from rlinf_core.channel.wire import Ask, Farewell, Reply, Say
from rlinf_core.collective.dispatcher import Delivery
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.link import Link
from rlinf_core.collective.parcel import Parcel
from rlinf_core.collective.spin import spin
from rlinf_core.failures import PackedError
from rlinf_core.waiting import OperationKind

AnyRequest: TypeAlias = Request[Any]
# Long after this, what one processor has stored is seen by all others.
_VISIBLE_AFTER = 1e-3


class Pending:
    """The operations that go on, by ticket. Whoever takes one out settles it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tickets = itertools.count(TICKETS, TICKETS)
        self._open: dict[int, AnyRequest] = {}
        # What the other side was told to end, and has not said what became of.
        self._withdrawn: dict[int, AnyRequest] = {}
        # The memory that is shared with the channel at the other end of a link.
        self.pages: dict[Link, ClientPage] = {}
        # The last words of channels that have ended.
        self.farewells: dict[Link, Farewell] = {}
        self._deadlines = Deadlines(lambda: self._open)
        endpoint.serve(wire.REPLIES, self._reply)
        endpoint.on_close(self._fail_all)

    def next_ticket(self) -> int:
        return next(self._tickets)

    def add(self, request: AnyRequest, *, detached: bool) -> None:
        """Wait for replies to a request; one that is `detached` ends at its deadline although nobody waits for it."""
        self._open[request.ticket] = request
        if detached:
            self._deadlines.watch()

    def watch(self, link: Link, request: AnyRequest) -> None:
        """Look into the request's box for a moment; afterwards its answer is announced by a message."""
        boxes, ticket = request.boxes, request.ticket
        if boxes is None or request.settled:
            return
        board = self._endpoint.board
        board.check()
        # What is traced is waited for as everything is.
        seconds = self._endpoint.settings.spin if spans.recorder is None else 0.0
        if spin(lambda: boxes.answered(ticket), time.monotonic() + seconds) or boxes.answered(ticket):
            board.operations.passed(request.kind)
            self._unpack(link, request)
            return
        boxes.leave_note(ticket)
        if not boxes.answered(ticket):
            request.wait_until(min(request.deadline, time.monotonic() + _VISIBLE_AFTER), request.seconds)
        if boxes.answered(ticket):
            self._unpack(link, request)

    def withdraw(self, request: AnyRequest) -> bool:
        """Take an operation out that shall end; False when it has ended."""
        ticket = request.ticket
        if ticket not in self._open:
            return False
        # Before it leaves the other: who hears of it at this very moment must find it in one of them.
        self._withdrawn[ticket] = request
        if self._open.pop(ticket, None) is None:
            self._withdrawn.pop(ticket, None)
            return False
        return True

    def forget(self, request: AnyRequest) -> None:
        """The other side was never told of a request, or of its end."""
        self._open.pop(request.ticket, None)
        self._withdrawn.pop(request.ticket, None)

    def take_all(self, channel: str) -> list[AnyRequest]:
        """Take out what goes on with one channel."""
        taken: list[AnyRequest] = []
        for requests in (self._open, self._withdrawn):
            for ticket, request in requests.copy().items():
                if request.target == channel and requests.pop(ticket, None) is not None:
                    taken.append(request)
        return taken

    def _fail_all(self, error: Exception) -> None:
        """This process hears of channels no more."""
        for requests in (self._open, self._withdrawn):
            for request in requests.copy().values():
                if request.fail(error):
                    # Seen: a put may have been accepted, so nobody is told that its item is lost.
                    request.exception()

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
                self._note_size(delivery.link, len(head) <= LARGEST)
                self._taken(delivery.link, request, reply.slot, (head,))
        elif say == Say.MAIL:
            request = self._open.get(ticket)
            if request is not None:
                self._unpack(delivery.link, request)
        elif say == Say.LARGE:
            self._note_size(delivery.link, False)
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
                self._taken(delivery.link, request, reply.slot, request.pieces)

    def _note_size(self, link: Link, small: bool) -> None:
        page = self.pages.get(link)
        if page is not None:
            page.small = small

    def _unpack(self, link: Link, request: AnyRequest) -> None:
        """The answer is in the request's box."""
        if request.boxes is None or self._open.pop(request.ticket, None) is None:
            return  # it was withdrawn, or a message came first
        if request.kind is OperationKind.PUT:
            request.finish(None)
        else:
            slot, item = request.boxes.mail(request.ticket)
            self._taken(link, request, slot, (item,))

    def _taken(self, link: Link, request: AnyRequest, slot: int, pieces: Sequence[object]) -> None:
        """Tell that the items are here, before their consumer sees them: they can not go to another one any more."""
        if not request.claim():
            # It was given up at this very moment, and found itself taken out already.
            let_go(pieces)
            self._endpoint.post(link, wire.REQUESTS, wire.pack_request(Ask.CANCEL, request.ticket))
            return
        self._sign(link, slot, request.ticket)
        request.arrive(pieces)

    def _sign(self, link: Link, slot: int, ticket: int) -> None:
        page = self.pages.get(link)
        if slot != NO_SLOT and page is not None:
            page.receipts.sign(slot, ticket)
        else:
            self._endpoint.post(link, wire.REQUESTS, wire.pack_request(Ask.TAKEN, ticket))


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
