"""The heart of a channel's process: orders what producers put and what consumers ask for.

Everything happens in the thread that reads, one message after another, and nothing in it waits. A small item passes
through as the bytes that it came in; a large one stays where it arrived, in shared memory wherever possible, and its
consumer is told where that is.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import cast

from rlinf_core.channel import wire
from rlinf_core.channel.boxes import LARGEST
from rlinf_core.channel.clientele import REMEMBERED, Client, Loss, Ticket
from rlinf_core.channel.effects import Accepted, Delivered, Effect, Item, Lost, Reason, Refused, Taken
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.memory_gate import MemoryGate
from rlinf_core.channel.outbox import Outbox, Payload
from rlinf_core.channel.page import ChannelPage
from rlinf_core.channel.receipts import NO_SLOT
from rlinf_core.channel.wire import Ask, Question, Request, Say
from rlinf_core.collective.dispatcher import Delivery
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.link import Link
from rlinf_core.collective.parcel import Parcel
from rlinf_core.collective.relay import Handover
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import PackedError
from rlinf_core.manager.wakers import ChannelView

_log = logging.getLogger(__name__)
_PLACES = {reason: place for place, reason in enumerate(wire.REASONS)}


class Broker:
    """Holds the queues of one channel, and answers its clients through `endpoint`.

    Args:
        name: of the channel.
        endpoint: of this process.
        maxsize: how many items each key holds; 0 means any number.
        gate: tells when it must not take more; by default by the memory of the machine.
    """

    def __init__(self, name: str, endpoint: Endpoint, maxsize: int = 0, gate: MemoryGate | None = None) -> None:
        self.name = name
        self._endpoint = endpoint
        self._outbox = Outbox(endpoint)
        self._queue: KeyedQueue[Payload] = KeyedQueue(maxsize)
        self._gate = MemoryGate() if gate is None else gate
        # One thread reads; others come in when a message could not be sent, and to ask for the view.
        self._lock = threading.RLock()
        self._clients: dict[str, Client] = {}
        self._dead_producers: deque[WorkerDiedError] = deque(maxlen=REMEMBERED)
        self._losses: deque[Loss] = deque(maxlen=REMEMBERED)
        self._farewell: bytes | None = None
        self._asks: dict[int, Callable[[Client, Request, Delivery], None]] = {
            Ask.HELLO: self._hello,
            Ask.PUT: self._put,
            Ask.PUT_MANY: self._put_many,
            Ask.ANNOUNCE: self._announce,
            Ask.GET: self._get,
            Ask.GET_BATCH: self._get_batch,
            Ask.TAKEN: self._taken,
            Ask.CANCEL: self._cancel,
            Ask.CLOSE: self._close,
            Ask.QUESTION: self._question,
        }
        endpoint.serve(wire.REQUESTS, self._request)
        endpoint.on_peer_lost(self._lost)

    def view(self) -> ChannelView:
        """Return what the manager needs to tell who waits for whom."""
        with self._lock:
            clients = list(self._clients.values())
            dead = {error.address for error in self._dead_producers}
            return ChannelView(
                tuple(sorted({client.name for client in clients if client.produces} | dead)),
                tuple(client.name for client in clients if client.consumes),
                self._queue.maxsize,
                {key: figures.depth for key, figures in self._queue.statistics().items() if figures.depth},
            )

    # What clients ask

    def _request(self, delivery: Delivery) -> None:
        link = delivery.link
        request = wire.unpack_request(delivery.key)
        with self._lock:
            client = self._clients.get(link.peer)
            if client is None or client.incarnation != link.incarnation:
                client = self._admit(link)
            self._collect_receipts(client)
            self._asks[request.ask](client, request, delivery)

    def _admit(self, link: Link) -> Client:
        if link.peer in self._clients:
            self._lost(link.peer, "it was launched anew")
        client = self._clients[link.peer] = Client(link)
        return client

    def _hello(self, client: Client, request: Request, delivery: Delivery) -> None:
        client.page = ChannelPage(delivery.parcel, request.ticket) if delivery.parcel.lease is not None else None
        self._answer(client, Say.WELCOME, request.ticket, wire.Facts(self._queue.maxsize))
        if self._farewell is not None:
            self._outbox.reply(client.link, wire.pack_reply(Say.ENDED, 0), self._farewell)

    def _put(self, client: Client, request: Request, delivery: Delivery) -> None:
        client.produces = True
        parcel = delivery.parcel
        if client.cancelled and request.ticket in client.cancelled:
            parcel.release()
            return
        payload = parcel if parcel.frame.sizes else parcel.frame.head
        self._hold(_weigh(payload))
        self._carry_out(
            self._queue.put(
                (client, request.ticket),
                payload,
                weight=delivery.weight,
                key=request.key,
                size=parcel.size,
                producer=client,
                now=time.monotonic(),
                wait=request.wait,
            )
        )

    def _put_many(self, client: Client, request: Request, delivery: Delivery) -> None:
        client.produces = True
        now = time.monotonic()
        effects: list[Effect[Payload]] = []
        for ticket, weight, payload in wire.unpack_puts(delivery.parcel.frame.head):
            if client.cancelled and ticket in client.cancelled:
                continue
            self._hold(len(payload))
            effects += self._queue.put(
                (client, ticket),
                payload,
                weight=weight,
                key=request.key,
                size=len(payload),
                producer=client,
                now=now,
            )
        self._carry_out(effects)

    def _announce(self, client: Client, request: Request, delivery: Delivery) -> None:
        client.produces = True
        self._queue.announce((client, request.ticket), key=request.key, producer=client)

    def _get(self, client: Client, request: Request, delivery: Delivery) -> None:
        client.consumes = True
        ticket = (client, request.ticket)
        now = time.monotonic()
        self._carry_out(self._queue.get(ticket, key=request.key, consumer=client, now=now, wait=request.wait))
        if self._dead_producers:
            self._fail_orphans()

    def _get_batch(self, client: Client, request: Request, delivery: Delivery) -> None:
        client.consumes = True
        ticket = (client, request.ticket)
        now = time.monotonic()
        self._carry_out(
            self._queue.get_batch(ticket, delivery.weight, key=request.key, consumer=client, now=now, wait=request.wait)
        )
        if self._dead_producers:
            self._fail_orphans()

    def _taken(self, client: Client, request: Request, delivery: Delivery) -> None:
        self._carry_out(self._queue.taken((client, request.ticket), time.monotonic()))

    def _cancel(self, client: Client, request: Request, delivery: Delivery) -> None:
        effects = self._queue.cancel((client, request.ticket), time.monotonic())
        if client.page is not None:
            client.page.receipts.drop(request.ticket)
        # It may be a put that is still under way behind this message.
        client.cancelled.append(request.ticket)
        for effect in effects:
            if isinstance(effect, Refused) and not effect.why:
                effect.why = self._state(request.key)
        self._carry_out(effects or [Refused((client, request.ticket), Reason.CANCELLED)])

    def _state(self, key: str) -> str:
        depth, bound = self._queue.depth(key), self._queue.maxsize
        if self._gate.closed:
            return f"memory runs short on the channel's node, and it holds {self._gate.held} bytes"
        if 0 < bound <= depth:
            return f"the queue is full: it holds {depth} items of {bound}"
        return f"the queue holds {depth} items" if depth else "the queue is empty"

    def _collect_receipts(self, client: Client) -> None:
        """Hear what a consumer has signed for."""
        if client.page is not None:
            for ticket in client.page.receipts.signed():
                self._carry_out(self._queue.taken((client, ticket), time.monotonic()))

    def _close(self, client: Client, request: Request, delivery: Delivery) -> None:
        for each in list(self._clients.values()):
            self._collect_receipts(each)
        self._carry_out(self._queue.close(time.monotonic()))
        self._answer(client, Say.ANSWER, request.ticket, None)

    def _question(self, client: Client, request: Request, delivery: Delivery) -> None:
        answer: object
        match delivery.weight:
            case Question.DEPTH:
                answer = self._queue.depth(request.key)
            case Question.FULL:
                answer = self._queue.full(request.key)
            case Question.STATISTICS:
                answer = self._queue.statistics()
            case Question.LOSSES:
                answer = list(self._losses)
            case _:
                self._send_items(client, request.ticket, self._queue.peek_all(request.key), Handover.COPY)
                return
        self._answer(client, Say.ANSWER, request.ticket, answer)

    # What becomes of it

    def _carry_out(self, effects: Sequence[Effect[Payload]], error: Exception | None = None) -> None:
        """Tell clients, and let go of what nobody needs. A get that ends because of `error` raises it."""
        accepted: dict[Client, list[int]] = {}
        lost: list[Loss] = []
        for effect in effects:
            if isinstance(effect, Accepted):
                client, ticket = cast("Ticket", effect.ticket)
                # Who looks for it in a box needs no message.
                office = None if client.page is None else client.page.post_office
                if office is None or not office.has_box(ticket) or office.answer(ticket):
                    accepted.setdefault(client, []).append(ticket)
        # Producers first: while a consumer is served, they make the next item.
        for client, tickets in accepted.items():
            head = wire.pack_tickets(tickets) if len(tickets) > 1 else b""
            self._outbox.reply(client.link, wire.pack_reply(Say.ACCEPTED, tickets[0]), head)
        for effect in effects:
            if isinstance(effect, Accepted):
                continue
            if isinstance(effect, Lost):
                self._drop(effect.dropped)
                lost.append(Loss(cast("Client", effect.producer).name, effect.key))
                continue
            client, ticket = cast("Ticket", effect.ticket)
            if isinstance(effect, Delivered):
                self._send_items(client, ticket, effect.items, Handover.LEND)
            elif isinstance(effect, Taken):
                for item in effect.items:
                    self._hold(-_weigh(item.payload))
                    if isinstance(item.payload, Parcel):
                        self._endpoint.concede(client.link, item.payload)
            else:
                self._refuse(client, ticket, effect, error)
        if lost:
            self._report(lost)

    def _answer(self, client: Client, say: Say, ticket: int, answer: object) -> None:
        self._outbox.reply(client.link, wire.pack_reply(say, ticket), pickle.dumps(answer))

    def _send_items(self, client: Client, ticket: int, items: Sequence[Item[Payload]], handover: Handover) -> None:
        def failed(error: BaseException) -> None:
            if isinstance(error, Exception) and not isinstance(error, WorkerDiedError):
                with self._lock:
                    self._carry_out(self._queue.cancel((client, ticket), time.monotonic()), error)

        page = client.page if handover is Handover.LEND else None
        # On a closed channel others wait until these are taken, so that is to be heard at once.
        slot = NO_SLOT if page is None or self._queue.closed else page.receipts.slot(ticket)
        if page is not None and page.post_office.has_box(ticket):
            payload = items[0].payload
            if not isinstance(payload, Parcel) and len(payload) <= LARGEST:
                if page.post_office.deliver(ticket, slot, payload):
                    self._outbox.reply(client.link, wire.pack_reply(Say.MAIL, ticket))
                return
        self._outbox.send_items(client.link, ticket, items, slot, handover, failed)

    def _refuse(self, client: Client, ticket: int, refused: Refused[Payload], error: Exception | None) -> None:
        self._drop(refused.dropped)
        if error is not None and refused.reason is Reason.CANCELLED:
            self._answer(client, Say.FAILED, ticket, PackedError.of(error))
            return
        key = wire.pack_reply(Say.REFUSED, ticket, _PLACES[refused.reason])
        self._outbox.reply(client.link, key, refused.why.encode())

    def _report(self, lost: Sequence[Loss]) -> None:
        self._losses.extend(lost)
        for loss, count in Counter(lost).items():
            _log.warning(
                "channel `%s`: %d items for key `%s` are lost, for their producer `%s` died before they were accepted",
                self.name,
                count,
                loss.key,
                loss.producer,
            )

    # The end

    def say_farewell(self) -> bool:
        """Tell all clients that the channel has come to its end, if it has, and whether it has.

        It has when it is closed, nothing can come out any more, and nobody uses memory that was passed on here: that
        is given back by this process if its user dies.
        """
        with self._lock:
            if not self._queue.drained or self._endpoint.answers_for_memory():
                return False
            self._farewell = pickle.dumps(wire.Farewell(self._queue.statistics(), list(self._losses)))
            for client in self._clients.values():
                self._outbox.reply(client.link, wire.pack_reply(Say.ENDED, 0), self._farewell)
            return True

    # Memory

    def keep_house(self) -> None:
        """Look after what no message tells of; to be called now and then."""
        self._endpoint.collect()
        with self._lock:
            for client in self._clients.values():
                self._collect_receipts(client)
            if self._gate.look():
                self._move_gate()

    def _hold(self, nbytes: int) -> None:
        if self._gate.add(nbytes):
            self._move_gate()

    def _move_gate(self) -> None:
        closed = self._gate.closed
        if closed:
            _log.warning(
                "channel `%s` holds %d bytes and memory runs short: producers wait until something is taken",
                self.name,
                self._gate.held,
            )
        self._carry_out(self._queue.hold_back(closed, time.monotonic()))

    def _drop(self, payload: Payload | None) -> None:
        if payload is not None:
            self._hold(-_weigh(payload))
        if isinstance(payload, Parcel):
            payload.release()

    # Who dies

    def _lost(self, name: str, reason: str) -> None:
        with self._lock:
            client = self._clients.pop(name, None)
            if client is None:
                return
            self._collect_receipts(client)
            self._carry_out(self._queue.remove(client, time.monotonic()))
        if client.produces:
            # Not in this thread, which reads for everybody: the explanation may take a moment.
            threading.Thread(target=self._mourn, args=(client, reason), name="rlinf-lost", daemon=True).start()

    def _mourn(self, client: Client, reason: str) -> None:
        error = self._endpoint.explain(client.link, reason)
        with self._lock:
            died = error if isinstance(error, WorkerDiedError) else WorkerDiedError(client.name, cause=str(error))
            self._dead_producers.append(died)
            self._fail_orphans()

    def _fail_orphans(self) -> None:
        """End the gets that nobody can serve: every known producer is dead."""
        if not self._dead_producers or any(client.produces for client in self._clients.values()):
            return
        for ticket in self._queue.waiting_gets():
            # What a batch had reserved goes back, and may be all that the next one needs.
            if self._queue.waiting(ticket) is not None:
                self._carry_out(self._queue.cancel(ticket, time.monotonic()), self._orphaned())

    def _orphaned(self) -> WorkerDiedError:
        last = self._dead_producers[-1]
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(one.address for one in self._dead_producers))
        why = f"channel `{self.name}` holds too little, and all that ever put into it are dead: {names}"
        return WorkerDiedError(
            last.address, node=last.node, cause=f"{last.cause}; {why}" if last.cause else why, where=self.name
        )


def _weigh(payload: Payload) -> int:
    """Return the bytes that a payload takes of this process's own memory."""
    return payload.nbytes if isinstance(payload, Parcel) else len(payload)
