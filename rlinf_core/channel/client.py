"""A channel as one process uses it, on whatever node it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from rlinf_core.address import WorkerAddress
from rlinf_core.channel import wire
from rlinf_core.channel.backend import Backend
from rlinf_core.channel.boxes import box_of
from rlinf_core.channel.effects import Reason
from rlinf_core.channel.handle import PutRequest, see_to_dropped
from rlinf_core.channel.lane import Lane, Outgoing
from rlinf_core.channel.page import SIZE, ClientPage
from rlinf_core.channel.pending import AnyRequest, Pending
from rlinf_core.channel.request import Request, Shape
from rlinf_core.channel.wire import Ask, Question
from rlinf_core.collective.connector import Connector
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.payload import Encoded
from rlinf_core.collective.transports.base import Message
from rlinf_core.collective.work import Work
from rlinf_core.errors import ChannelClosed, CommunicationTimeoutError, WorkerDiedError
from rlinf_core.manager.registry import CLOSED
from rlinf_core.waiting import OperationKind

# From this size on a put is announced, so that it is known to be lost if its producer dies before it is there.
_ANNOUNCED = 4 << 20


class ChannelClient(Backend):
    """One channel, as one process uses it.

    Attributes:
        address: of the channel's process.
        link: to it.
    """

    def __init__(
        self, endpoint: Endpoint, me: WorkerAddress, connector: Connector, pending: Pending, name: str
    ) -> None:
        super().__init__(name)
        self.address = WorkerAddress(name).get_child_address(0)
        self._endpoint = endpoint
        self._pending = pending
        self.link = endpoint.link(me, self.address, connector)
        self._greeting = threading.Lock()
        # The connection that the broker was greeted on.
        self._greeted: object = None
        self._facts = wire.Facts(0)
        self._lanes: dict[str, Lane] = {}
        # Large puts that a thread still sends: what is put after them goes after them.
        self._under_way = 0
        self._lock = threading.Lock()

    @property
    def maxsize(self) -> int:
        self.connect()
        return self._facts.maxsize

    def connect(self, timeout: float | None = None) -> None:
        if self._is_greeted():
            return
        with self._greeting:
            if self._is_greeted():
                return
            # Whoever asks before the channel has the new page is answered by a message.
            self._pending.pages.pop(self.link, None)
            # By default the contact may take so long, and the answer as much.
            seconds = 2 * self._endpoint.settings.connect_timeout if timeout is None else timeout
            hello = self._request(OperationKind.CONNECT, wire.DEFAULT_KEY, seconds, Shape.ANSWER, detached=False)
            try:
                self._greet(hello)
                self._facts = cast("wire.Facts", hello.wait())
            except (WorkerDiedError, ChannelClosed) as error:
                if not self._ended(error):
                    raise
            self._greeted = self.link.outgoing.connection

    def _greet(self, hello: AnyRequest) -> None:
        message = Message(b"", tag=wire.REQUESTS, key=wire.pack_request(Ask.HELLO, hello.ticket))
        work: Work[object] = Work(hello.kind, self.name, hello.seconds, self._endpoint.board)
        try:
            page = self._endpoint.share(self.link, message, SIZE, work)
        except BaseException as error:
            hello.fail(error)
            raise
        if page is not None:
            self._pending.pages[self.link] = ClientPage(page)

    def _is_greeted(self) -> bool:
        connection = self.link.outgoing.connection
        if connection is not None and self._greeted is connection and not connection.closed:
            return True
        return self._farewell is not None

    # Operations

    def put(
        self, item: object, weight: float, key: str, *, wait: bool, timeout: float | None, detached: bool
    ) -> Request[None]:
        encoded = self._endpoint.encode(item)
        self.connect(timeout)
        boxed = wait and not detached
        request = self._request(OperationKind.PUT, key, timeout, Shape.NOTHING, detached=detached, boxed=boxed)
        if self._farewell is not None:
            self._fail(request, None)
        elif detached:
            self._put_in_lane(request, encoded, weight, key)
            request.driver = self.link.outgoing.connection
        else:
            self._issue(request, lambda: self._put_in_turn(request, encoded, weight, key, wait=wait))
        return request

    def _put_in_turn(self, request: AnyRequest, encoded: Encoded, weight: float, key: str, *, wait: bool) -> None:
        lane = self._lanes.get(key)
        if lane is not None:
            lane.flush()
        if encoded.nbytes <= wire.SMALL:
            self._send_small(request, encoded, weight, wait=wait)
        else:
            self._send_large(request, encoded, weight, wait=wait, detached=False)
        request.driver = self.link.outgoing.connection

    def get(
        self, key: str, batch_weight: float | None, *, wait: bool, timeout: float | None, detached: bool
    ) -> Request[Any]:
        self.connect(timeout)
        if batch_weight is None:
            boxed = wait and not detached
            request = self._request(OperationKind.GET, key, timeout, Shape.ONE, detached=detached, boxed=boxed)
            self._issue(request, lambda: self._ask(Ask.GET, request, wait=wait))
        else:
            request = self._request(OperationKind.GET_BATCH, key, timeout, Shape.LIST, detached=detached)
            self._issue(request, lambda: self._ask(Ask.GET_BATCH, request, batch_weight, wait=wait))
        return request

    def ask(self, question: Question, key: str, timeout: float | None = None) -> Any:
        self.connect(timeout)
        shape = Shape.LIST if question is Question.PEEK else Shape.ANSWER
        request = self._request(OperationKind.QUERY, key, timeout, shape, detached=False)
        self._ask(Ask.QUESTION, request, question)
        try:
            return request.wait()
        except ChannelClosed:
            return self._last_answer(question)

    def close(self, timeout: float | None = None) -> None:
        self.connect(timeout)
        request = self._request(OperationKind.CLOSE, wire.DEFAULT_KEY, timeout, Shape.ANSWER, detached=False)
        self._ask(Ask.CLOSE, request)
        # It was closed before, and has ended since.
        with suppress(ChannelClosed):
            request.wait()

    # Ends

    def lost(self, reason: str) -> None:
        """The channel's process is gone."""
        self._pending.pages.pop(self.link, None)
        for lane in list(self._lanes.values()):
            lane.drop()
        requests = self._pending.take_all(self.name)
        if self._farewell is not None:
            for request in requests:
                self._fail(request, None)
        elif requests:
            # Not in this thread, which reads for everybody: the explanation may take a moment.
            threading.Thread(target=self._mourn, args=(reason, requests), name="rlinf-lost", daemon=True).start()

    def _mourn(self, reason: str, requests: list[AnyRequest]) -> None:
        error = self._endpoint.explain(self.link, reason)
        for request in requests:
            self._fail(request, error)

    @property
    def _farewell(self) -> wire.Farewell | None:
        return self._pending.farewells.get(self.link)

    def _ended(self, error: BaseException | None) -> bool:
        """Return whether the channel's process is gone because the channel is closed and drained."""
        if isinstance(error, WorkerDiedError) and (error.address, error.cause) == (str(self.address), CLOSED):
            # Who was not connected then does not know what went through it.
            self._pending.farewells.setdefault(self.link, wire.Farewell({}, []))
        return self._farewell is not None

    def _fail(self, request: AnyRequest, error: BaseException | None) -> bool:
        """End a request that nobody will answer, and tell whether that is because the channel has ended."""
        if not self._ended(error):
            request.fail(cast("BaseException", error))
            return False
        self._pending.forget(request)
        request.refuse(Reason.CLOSED, "")
        return True

    def _last_answer(self, question: Question) -> Any:
        """Return what is still known of a channel that has ended."""
        farewell = self._farewell
        match question:
            case Question.DEPTH:
                return 0
            case Question.FULL:
                return False
            case Question.PEEK:
                return []
            case Question.STATISTICS:
                return {} if farewell is None else farewell.statistics
            case Question.LOSSES:
                return [] if farewell is None else farewell.losses

    def _withdraw(self, request: Request[object]) -> bool:
        if request.kind is OperationKind.CONNECT:
            # There is nothing to undo: who has not answered by now is not waited for.
            self._pending.forget(request)
            return False
        if self._pending.withdraw(request):
            words = wire.pack_request(Ask.CANCEL, request.ticket, request.packed_key)
            if not self._endpoint.post(self.link, wire.REQUESTS, words):
                self._pending.forget(request)
                return False
        return True

    # Sending

    def _request(
        self,
        kind: OperationKind,
        key: str,
        timeout: float | None,
        shape: Shape,
        *,
        detached: bool,
        boxed: bool = False,
    ) -> AnyRequest:
        """Return a request to which replies are waited for. `boxed`: its caller looks for them in a box."""
        seconds = self._endpoint.seconds(timeout)
        ticket, boxes = self._pending.next_ticket(), None
        page = self._pending.pages.get(self.link) if boxed else None
        if page is not None and (page.small or kind is OperationKind.PUT):
            ticket = page.boxes.take(ticket)
            boxes = page.boxes if box_of(ticket) else None
        make: type[Request[Any]] = Request
        if detached:
            see_to_dropped()
            make = PutRequest if kind is OperationKind.PUT else Request
        request: AnyRequest = make(
            ticket,
            kind,
            self.name,
            key,
            seconds,
            shape,
            self._withdraw,
            self._endpoint.board,
            # A lane publishes all of its puts as one.
            detached=detached and kind is not OperationKind.PUT,
            boxes=boxes,
        )
        self._pending.add(request, detached=detached)
        return request

    def _issue(self, request: AnyRequest, send: Callable[[], None]) -> None:
        """Send a request, and look into its box for a moment."""
        try:
            send()
            self._pending.watch(self.link, request)
        except BaseException:
            # Interrupted: nobody will take what comes for it.
            request.abandon()
            raise
        finally:
            if request.boxes is not None:
                request.boxes.left(request.ticket)

    def _ask(self, ask: Ask, request: AnyRequest, weight: float = 0.0, *, wait: bool = True) -> None:
        if self._farewell is not None:
            self._fail(request, None)
            return
        words = wire.pack_request(ask, request.ticket, request.packed_key, wait)
        if not self._endpoint.post(self.link, wire.REQUESTS, words, b"", weight):
            self._send(request, Message(b"", tag=wire.REQUESTS, key=words, weight=weight))
        request.driver = self.link.outgoing.connection

    def _send_small(self, request: AnyRequest, encoded: Encoded, weight: float, *, wait: bool) -> None:
        words, head = wire.pack_request(Ask.PUT, request.ticket, request.packed_key, wait), _packed(encoded)
        if self._under_way or not self._endpoint.post(self.link, wire.REQUESTS, words, head, weight):
            self._send(request, Message(head, tag=wire.REQUESTS, key=words, weight=weight))

    def _send_large(
        self, request: AnyRequest, encoded: Encoded, weight: float, *, wait: bool = True, detached: bool
    ) -> None:
        key = request.packed_key
        # Its stream is a part of the body too where there is nothing else, for a body tells a large item.
        limit = self._endpoint.settings.inline_limit if encoded.parts else 0
        words = wire.pack_request(Ask.PUT, request.ticket, key, wait)
        message = Message.of(encoded, limit, tag=wire.REQUESTS, key=words, weight=weight)
        if message.body_size >= _ANNOUNCED:
            self._endpoint.post(self.link, wire.REQUESTS, wire.pack_request(Ask.ANNOUNCE, request.ticket, key))
        if detached:
            self._send_in_background(request, message)
        else:
            self._send(request, message)

    def _send(self, request: AnyRequest, message: Message) -> None:
        """Send in the order of the link."""
        work: Work[object] = Work(request.kind, self.name, request.seconds, self._endpoint.board, key=request.key)
        try:
            self._endpoint.send(self.link, message, work)
        except CommunicationTimeoutError as late:
            # It stays here if its turn has not come. If it has, the channel says what became of it.
            work.fail(late)
            request.expire(late)
        except BaseException as error:
            work.fail(error)
            if not self._fail(request, error):
                raise

    def _send_in_background(self, request: AnyRequest, message: Message) -> None:
        """As `_send`; a failure is that of the request."""
        work: Work[object] = Work(request.kind, self.name, request.seconds, key=request.key)
        request.sending = work
        with self._lock:
            self._under_way += 1

        def sent() -> None:
            with self._lock:
                self._under_way -= 1
            error = work.exception()
            if error is not None:
                self._fail(request, error)

        work.add_done_callback(sent)
        self._endpoint.send_async(self.link, message, work)

    # Asynchronous puts

    def _put_in_lane(self, request: AnyRequest, encoded: Encoded, weight: float, key: str) -> None:
        item = _packed(encoded) if encoded.nbytes <= wire.SMALL else encoded
        put = Outgoing(request, item, weight, encoded.nbytes)
        while True:
            lane = self._lanes.get(key)
            if lane is None:
                with self._lock:
                    lane = self._lanes.get(key) or self._open_lane(key)
            request.lane = lane
            if lane.add(put):
                return

    def _open_lane(self, key: str) -> Lane:
        operations = self._endpoint.board.operations
        serial = operations.begin(OperationKind.PUT, self.name, key, detached=True)

        def idle() -> None:
            operations.end(serial)
            self._lanes.pop(key, None)

        lane = self._lanes[key] = Lane(self._send_run, idle)
        return lane

    def _send_run(self, run: Sequence[Outgoing]) -> None:
        first = run[0]
        request = first.request
        if isinstance(first.item, Encoded):
            self._send_large(request, first.item, first.weight, detached=True)
            return
        key = request.packed_key
        if len(run) == 1:
            words, head, weight = wire.pack_request(Ask.PUT, request.ticket, key), first.item, first.weight
        else:
            words, weight = wire.pack_request(Ask.PUT_MANY, request.ticket, key), 0.0
            head = wire.pack_puts([(put.request.ticket, put.weight, cast("bytes", put.item)) for put in run])
        if self._under_way or not self._endpoint.post(self.link, wire.REQUESTS, words, head, weight):
            self._send_in_background(request, Message(head, tag=wire.REQUESTS, key=words, weight=weight))


def _packed(encoded: Encoded) -> bytes:
    return wire.pack_item(encoded.head, encoded.parts)
