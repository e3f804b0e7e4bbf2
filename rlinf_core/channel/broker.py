"""The broker of a channel: accepts the items of producers, and delivers them to consumers.

The reading threads do all work, one message at a time, and never block in it. A small item passes through as the bytes
that arrived; a large one stays where it arrived, in shared memory wherever possible, and its consumer gets its
location.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import cast

from rlinf_core.channel import wire
from rlinf_core.channel.broker_clients import (
    REMEMBERED,
    BrokerClient,
    ClientOpId,
    LostItem,
    MemoryGate,
    Payload,
)
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.operation import key_of
from rlinf_core.channel.queue_state import Accepted, Acknowledged, Delivered, Effect, Lost, QueuedItem, Reason, Refused
from rlinf_core.channel.wire import LARGEST, NO_ACK_SLOT, BrokerMailbox, Query, ReplyKind, RequestHeader, RequestKind
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import PackedError
from rlinf_core.suggest import quoted
from rlinf_core.supervision.waits import ChannelView

_log = logging.getLogger(__name__)
_PLACES = {reason: place for place, reason in enumerate(wire.REASONS)}


class Broker:
    """The queues of one channel, and the service that its clients use through `endpoint`.

    Args:
        maxsize: the number of items that each key may hold; 0 means any number.
        gate: decides when the broker must not accept more; by default from the memory of the machine.
    """

    def __init__(self, name: str, endpoint: Endpoint, maxsize: int = 0, gate: MemoryGate | None = None) -> None:
        self.name = name
        self._endpoint = endpoint
        self._queue: KeyedQueue[Payload] = KeyedQueue(maxsize)
        self._gate = MemoryGate() if gate is None else gate
        # The reading thread of each client takes it, and so do threads that report a failed send or call `view`.
        self._lock = threading.RLock()
        self._clients: dict[str, BrokerClient] = {}
        self._dead_producers: deque[WorkerDiedError] = deque(maxlen=REMEMBERED)
        self._losses: deque[LostItem] = deque(maxlen=REMEMBERED)
        self._closed_notice: bytes | None = None
        self._asks: dict[int, Callable[[BrokerClient, RequestHeader, ReceivedMessage], None]] = {
            RequestKind.HELLO: self._hello,
            RequestKind.PUT: self._put,
            RequestKind.PUT_MANY: self._put_many,
            RequestKind.ANNOUNCE: self._announce,
            RequestKind.GET: self._get,
            RequestKind.TAKEN: self._taken,
            RequestKind.CANCEL: self._cancel,
            RequestKind.CLOSE: self._close,
            RequestKind.QUERY: self._question,
        }
        endpoint.serve(wire.REQUESTS, self._request)
        endpoint.on_peer_lost(self._lost)

    def view(self) -> ChannelView:
        """Return the view of this channel from which the manager builds the wait-for graph."""
        with self._lock:
            clients = list(self._clients.values())
            dead = {error.address for error in self._dead_producers}
            return ChannelView(
                tuple(sorted({client.name for client in clients if client.produces} | dead)),
                tuple(client.name for client in clients if client.consumes),
                self._queue.maxsize,
                {key: figures.depth for key, figures in self._queue.statistics().items() if figures.depth},
            )

    # Requests of clients

    def _request(self, stream: PeerStream, received: ReceivedMessage) -> None:
        request = wire.unpack_request(received.frame.key)
        connection = received.connection
        with self._lock:
            incarnation = stream.incarnation if connection is None else connection.peer.incarnation
            if incarnation in stream.former:
                # The sender's successor may be a client already, through a connection that another thread reads.
                received.release()
                return
            client = self._clients.get(stream.peer)
            if client is None or client.incarnation != incarnation:
                client = self._admit(stream, incarnation)
            self._collect_receipts(client)
            self._asks[request.ask](client, request, received)

    def _admit(self, stream: PeerStream, incarnation: str | None) -> BrokerClient:
        if stream.peer in self._clients:
            self._lost(stream.peer, "it was relaunched")
        # A relaunched producer may put the items that its predecessor did not, so it is no longer dead.
        missing = [error for error in self._dead_producers if error.address != stream.peer]
        self._dead_producers = deque(missing, REMEMBERED)
        client = self._clients[stream.peer] = BrokerClient(self._endpoint, stream, incarnation)
        return client

    def _hello(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        shared = received.lease is not None
        client.mailbox = BrokerMailbox(received.body(), request.op_id) if shared else None
        self._answer(client, ReplyKind.WELCOME, request.op_id, self._queue.maxsize)
        if self._closed_notice is not None:
            client.reply(wire.pack_reply(ReplyKind.ENDED, 0), self._closed_notice)

    def _put(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        client.produces = True
        if client.cancelled and request.op_id in client.cancelled:
            received.release()
            return
        payload = received if received.frame.sizes else received.frame.head
        self._hold(_weigh(payload))
        self._carry_out(
            self._queue.put(
                (client, request.op_id),
                payload,
                weight=received.frame.weight,
                key=request.key,
                size=received.size,
                producer=client,
                now=time.monotonic(),
                wait=request.wait,
            )
        )

    def _put_many(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        client.produces = True
        now = time.monotonic()
        effects: list[Effect[Payload]] = []
        for op_id, weight, payload in wire.unpack_plain(received.frame.head):
            if client.cancelled and op_id in client.cancelled:
                continue
            self._hold(len(payload))
            effects += self._queue.put(
                (client, op_id), payload, weight=weight, key=request.key, size=len(payload), producer=client, now=now
            )
        self._carry_out(effects)

    def _announce(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        client.produces = True
        self._queue.announce((client, request.op_id), key=request.key, producer=client)

    def _get(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        client.consumes = True
        op_id, need, now = (client, request.op_id), received.frame.weight or None, time.monotonic()
        self._carry_out(self._queue.get(op_id, need, key=request.key, consumer=client, now=now, wait=request.wait))
        if self._dead_producers:
            self._fail_orphans()

    def _taken(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        self._carry_out(self._queue.taken((client, request.op_id), time.monotonic()))

    def _cancel(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        effects = self._queue.cancel((client, request.op_id), time.monotonic())
        if client.mailbox is not None:
            client.mailbox.drop_ack(request.op_id)
        # It may be a put whose item is still in transit and arrives after this message.
        client.cancelled.append(request.op_id)
        for effect in effects:
            if isinstance(effect, Refused) and not effect.why:
                effect.why = self._state(request.key)
        self._carry_out(effects or [Refused((client, request.op_id), Reason.CANCELLED)])

    def _state(self, key: str) -> str:
        depth, bound = self._queue.depth(key), self._queue.maxsize
        if self._gate.closed:
            return f"memory runs short on the channel's node, and it holds {self._gate.held} bytes"
        if 0 < bound <= depth:
            return f"the queue is full: it holds {depth} items of {bound}"
        return f"the queue holds {depth} items" if depth else "the queue is empty"

    def _collect_receipts(self, client: BrokerClient) -> None:
        if client.mailbox is not None:
            for op_id in client.mailbox.collect_acks():
                self._carry_out(self._queue.taken((client, op_id), time.monotonic()))

    def _close(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        for other in list(self._clients.values()):
            self._collect_receipts(other)
        self._carry_out(self._queue.close(time.monotonic()))
        self._answer(client, ReplyKind.ANSWER, request.op_id, None)

    def _question(self, client: BrokerClient, request: RequestHeader, received: ReceivedMessage) -> None:
        answer: object
        match received.frame.weight:
            case Query.DEPTH:
                answer = self._queue.depth(request.key)
            case Query.FULL:
                answer = self._queue.full(request.key)
            case Query.STATISTICS:
                answer = self._queue.statistics()
            case Query.LOSSES:
                answer = list(self._losses)
            case _:
                self._send_items(client, request.op_id, self._queue.peek_all(request.key), lend=False)
                return
        self._answer(client, ReplyKind.ANSWER, request.op_id, answer)

    # Effects

    def _carry_out(self, effects: Sequence[Effect[Payload]], error: Exception | None = None) -> None:
        """Reply to clients, and drop refused and lost items. A get that is cancelled because of `error` raises it."""
        accepted: dict[BrokerClient, list[int]] = {}
        lost: list[LostItem] = []
        for effect in effects:
            if isinstance(effect, Accepted):
                client, op_id = cast("ClientOpId", effect.op_id)
                # A client that polls its answer slot needs no message.
                mailbox = client.mailbox
                if mailbox is None or not mailbox.has_slot(op_id) or mailbox.write_answer(op_id):
                    accepted.setdefault(client, []).append(op_id)
        # Producers first: they can make the next items while consumers are served.
        for client, op_ids in accepted.items():
            head = wire.pack(op_ids) if len(op_ids) > 1 else b""
            client.reply(wire.pack_reply(ReplyKind.ACCEPTED, op_ids[0]), head)
        for effect in effects:
            if isinstance(effect, Accepted):
                continue
            if isinstance(effect, Lost):
                self._drop(effect.dropped)
                lost.append(LostItem(cast("BrokerClient", effect.producer).name, key_of(effect.key)))
                continue
            client, op_id = cast("ClientOpId", effect.op_id)
            if isinstance(effect, Delivered):
                self._send_items(client, op_id, effect.items, lend=True)
            elif isinstance(effect, Acknowledged):
                for item in effect.items:
                    self._hold(-_weigh(item.payload))
                    if isinstance(item.payload, ReceivedMessage):
                        self._endpoint.release_lent(client.stream, item.payload)
            else:
                self._refuse(client, op_id, effect, error)
        if lost:
            self._report(lost)

    def _answer(self, client: BrokerClient, say: ReplyKind, op_id: int, answer: object) -> None:
        client.reply(wire.pack_reply(say, op_id), wire.pack(answer))

    def _send_items(
        self, client: BrokerClient, op_id: int, items: Sequence[QueuedItem[Payload]], *, lend: bool
    ) -> None:
        def failed(error: BaseException) -> None:
            if isinstance(error, Exception) and not isinstance(error, WorkerDiedError):
                with self._lock:
                    self._carry_out(self._queue.cancel((client, op_id), time.monotonic()), error)

        mailbox = client.mailbox if lend else None
        # On a closed channel other gets wait for this acknowledgement, so it must come as a message.
        ack_slot = NO_ACK_SLOT if mailbox is None or self._queue.closed else mailbox.reserve_ack(op_id)
        if mailbox is not None and mailbox.has_slot(op_id):
            payload = items[0].payload
            if not isinstance(payload, ReceivedMessage) and len(payload) <= LARGEST:
                if mailbox.write_item(op_id, ack_slot, payload):
                    client.reply(wire.pack_reply(ReplyKind.MAIL, op_id))
                return
        client.send_items(op_id, items, ack_slot, lend, failed)

    def _refuse(self, client: BrokerClient, op_id: int, refused: Refused[Payload], error: Exception | None) -> None:
        self._drop(refused.dropped)
        if error is not None and refused.reason is Reason.CANCELLED:
            self._answer(client, ReplyKind.FAILED, op_id, PackedError.of(error))
            return
        key = wire.pack_reply(ReplyKind.REFUSED, op_id, _PLACES[refused.reason])
        client.reply(key, refused.why.encode())

    def _report(self, lost: Sequence[LostItem]) -> None:
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

    def announce_end(self) -> bool:
        """Send all clients the closed notice if the channel has ended; return whether it has.

        It has ended when it is closed and drained, and no consumer uses memory that this process forwarded: if such a
        consumer dies, this process must release that memory.
        """
        with self._lock:
            if not self._queue.drained or self._endpoint.answers_for_memory():
                return False
            self._closed_notice = wire.pack(wire.ClosedNotice(self._queue.statistics(), list(self._losses)))
            for client in self._clients.values():
                client.reply(wire.pack_reply(ReplyKind.ENDED, 0), self._closed_notice)
            return True

    # Memory

    def run_maintenance(self) -> None:
        """Collect acknowledgements and memory, which no message triggers; to be called regularly."""
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
        if isinstance(payload, ReceivedMessage):
            payload.release()

    # Lost clients

    def _lost(self, name: str, reason: str) -> None:
        with self._lock:
            client = self._clients.pop(name, None)
            if client is None:
                return
            self._collect_receipts(client)
            self._carry_out(self._queue.remove(client, time.monotonic()))
        if client.produces:
            self._endpoint.explain_later(client.name, reason, lambda error: self._producer_lost(client, error))

    def _producer_lost(self, client: BrokerClient, error: Exception) -> None:
        with self._lock:
            if client.name in self._clients:
                return  # it was relaunched
            died = error if isinstance(error, WorkerDiedError) else WorkerDiedError(client.name, cause=str(error))
            self._dead_producers.append(died)
            self._fail_orphans()

    def _fail_orphans(self) -> None:
        """If every known producer is dead, fail the waiting gets."""
        if not self._dead_producers or any(client.produces for client in self._clients.values()):
            return
        for op_id in self._queue.waiting_gets():
            # The items reserved by a cancelled batch go back, and may suffice for the next get.
            if self._queue.waiting(op_id) is not None:
                self._carry_out(self._queue.cancel(op_id, time.monotonic()), self._orphaned())

    def _orphaned(self) -> WorkerDiedError:
        last = self._dead_producers[-1]
        names = quoted(dict.fromkeys(client.address for client in self._dead_producers))
        why = f"channel `{self.name}` holds too little, and all that ever put into it are dead: {names}"
        return WorkerDiedError(
            last.address, node=last.node, cause=f"{last.cause}; {why}" if last.cause else why, where=self.name
        )


def _weigh(payload: Payload) -> int:
    """Return how many bytes of this process's private memory a payload takes."""
    return payload.nbytes if isinstance(payload, ReceivedMessage) else len(payload)
