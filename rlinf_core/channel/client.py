"""The client of a channel in one process: sends requests in order, and settles each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from rlinf_core.address import WorkerAddress
from rlinf_core.channel import wire
from rlinf_core.channel.handle import operation_class
from rlinf_core.channel.operation import ChannelOperation, Decode, all_items, answer, one_item
from rlinf_core.channel.pending import AnyOperation, Pending, PutPipeline, QueuedPut
from rlinf_core.channel.queue_state import Reason
from rlinf_core.channel.wire import SIZE, ClientMailbox, Query, RequestKind, slot_of
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Resolver
from rlinf_core.collective.message import Encoded, Message
from rlinf_core.collective.work import Work
from rlinf_core.errors import ChannelClosed, CommunicationTimeoutError, WorkerDiedError
from rlinf_core.supervision.lives import CLOSED
from rlinf_core.waiting import OperationKind

# Puts of this size or more are announced, so that their loss is reported if the producer dies while sending.
_ANNOUNCED = 4 << 20
# The least time limit, in seconds, of the first contact for an operation: a caller who polls would never reach the
# channel within a shorter one.
_LEAST_CONTACT = 1.0


class ChannelClient:
    """The client of one channel, in one process; `address` is the address of the channel's process.

    Every operation takes a `timeout` in seconds; None means `RLINF_TIMEOUT`.
    """

    def __init__(self, endpoint: Endpoint, me: WorkerAddress, resolver: Resolver, name: str) -> None:
        self.name = name
        self.address = WorkerAddress(name).get_child_address(0)
        self._endpoint = endpoint
        self.stream = endpoint.stream(me, self.address, resolver)
        self.pending = Pending(endpoint, self.stream)
        self._greeting = threading.Lock()
        # The connection on which this client was registered with the broker.
        self._greeted: object = None
        self._maxsize = 0
        self._lock = threading.Lock()

    @property
    def maxsize(self) -> int:
        """The number of items that each key may hold; 0 means any number."""
        self.connect()
        return self._maxsize

    def connect(self, timeout: float | None = None) -> None:
        """Wait until the channel exists and register with its broker; by default up to 2 x `RLINF_CONNECT_TIMEOUT`."""
        if self._is_greeted():
            return
        with self._greeting:
            if self._is_greeted():
                return
            # Until the channel has the new mailbox, replies come as messages.
            self.pending.mailbox = None
            # By default one connect timeout to reach the channel, and another for its reply.
            seconds = 2 * self._endpoint.settings.connect_timeout if timeout is None else timeout
            hello = self._begin(OperationKind.CONNECT, wire.DEFAULT_KEY, seconds, answer, detached=False)
            try:
                self._greet(hello)
                self._maxsize = cast("int", hello.wait())
            except (WorkerDiedError, ChannelClosed) as error:
                if not self._ended(error):
                    raise
            self._greeted = self.stream.connection

    def _reach(self, timeout: float | None) -> None:
        self.connect(None if timeout is None else max(timeout, _LEAST_CONTACT))

    def _greet(self, hello: AnyOperation) -> None:
        message = Message(b"", tag=wire.REQUESTS, key=wire.pack_request(RequestKind.HELLO, hello.op_id))
        work: Work[object] = Work(hello.kind, self.name, hello.seconds, self._endpoint.waits)
        try:
            mailbox = self._endpoint.share(self.stream, message, SIZE, work)
        except BaseException as error:
            hello.fail(error)
            raise
        if mailbox is not None:
            self.pending.mailbox = ClientMailbox(mailbox)

    def _is_greeted(self) -> bool:
        connection = self.stream.connection
        if connection is not None and self._greeted is connection and not connection.closed:
            return True
        return self.pending.closed_notice is not None

    # Operations

    def put(
        self, item: object, weight: float, key: str, *, wait: bool, timeout: float | None, detached: bool
    ) -> ChannelOperation[None]:
        """Issue a put. `wait`: whether it waits for room; `detached`: whether its caller continues meanwhile."""
        encoded = self._endpoint.encode(item)
        self._reach(timeout)
        polls = timeout == 0 and not detached
        wait = wait and not polls
        operation = self._begin(
            OperationKind.PUT,
            key,
            self._endpoint.settings.connect_timeout if polls else timeout,
            None,
            detached=detached,
            use_slot=wait and not detached,
        )
        operation.polls = polls
        if self.pending.closed_notice is not None:
            self._fail(operation, None)
        elif detached:
            self._put_in_pipeline(operation, encoded, weight, key)
        else:
            self._issue(operation, lambda: self._put_in_turn(operation, encoded, weight, key, wait=wait))
        return operation

    def _put_in_turn(self, operation: AnyOperation, encoded: Encoded, weight: float, key: str, *, wait: bool) -> None:
        pipeline = self.pending.pipelines.get(key)
        if pipeline is not None:
            pipeline.flush()
        if encoded.nbytes <= wire.SMALL:
            self._request(RequestKind.PUT, operation, _packed(encoded), weight, wait=wait)
        else:
            self._send_large(operation, encoded, weight, wait=wait, detached=False)

    def get(
        self, key: str, batch_weight: float | None, *, wait: bool, timeout: float | None, detached: bool
    ) -> ChannelOperation[Any]:
        """Issue a get of one item, or of a batch of at least `batch_weight`."""
        self._reach(timeout)
        one = batch_weight is None
        kind, decode = (OperationKind.GET, one_item) if one else (OperationKind.GET_BATCH, all_items)
        polls = timeout == 0
        wait = wait and not polls
        use_slot = one and wait and not detached
        seconds = self._endpoint.settings.connect_timeout if polls else timeout
        operation = self._begin(kind, key, seconds, decode, detached=detached, use_slot=use_slot)
        operation.polls = polls
        self._issue(operation, lambda: self._ask(RequestKind.GET, operation, batch_weight or 0.0, wait=wait))
        return operation

    def ask(self, question: Query, key: str, timeout: float | None = None) -> Any:
        """Return the answer to a question."""
        self._reach(timeout)
        decode = all_items if question is Query.PEEK else answer
        operation = self._begin(OperationKind.QUERY, key, timeout, decode, detached=False)
        self._ask(RequestKind.QUERY, operation, question)
        try:
            return operation.wait()
        except ChannelClosed:
            return self._last_answer(question)

    def close(self, timeout: float | None = None) -> None:
        self._reach(timeout)
        operation = self._begin(OperationKind.CLOSE, wire.DEFAULT_KEY, timeout, answer, detached=False)
        self._ask(RequestKind.CLOSE, operation)
        # ChannelClosed: it was closed earlier and has ended since.
        with suppress(ChannelClosed):
            operation.wait()

    # Ends

    def lost(self, reason: str) -> None:
        self.pending.mailbox = None
        for pipeline in list(self.pending.pipelines.values()):
            pipeline.drop()
        operations = self.pending.take_all()
        if self.pending.closed_notice is not None:
            for operation in operations:
                self._fail(operation, None)
        elif operations:
            self._endpoint.explain_later(self.stream.peer, reason, lambda error: self._fail_all(operations, error))

    def _fail_all(self, operations: list[AnyOperation], error: Exception) -> None:
        for operation in operations:
            self._fail(operation, error)

    def _ended(self, error: BaseException | None) -> bool:
        """Return whether the channel's process ended because the channel is closed and drained."""
        if isinstance(error, WorkerDiedError) and (error.address, error.cause) == (str(self.address), CLOSED):
            # A client that was not connected at the end has not received the statistics.
            self.pending.closed_notice = self.pending.closed_notice or wire.ClosedNotice({}, [])
        return self.pending.closed_notice is not None

    def _fail(self, operation: AnyOperation, error: BaseException | None) -> bool:
        """Fail an operation that gets no reply; return whether the cause is that the channel has ended."""
        if not self._ended(error):
            operation.fail(cast("BaseException", error))
            return False
        self.pending.forget(operation)
        operation.refuse(Reason.CLOSED, "")
        return True

    def _last_answer(self, question: Query) -> Any:
        notice = self.pending.closed_notice or wire.ClosedNotice({}, [])
        answers: dict[Query, Any] = {
            Query.DEPTH: 0,
            Query.FULL: False,
            Query.PEEK: [],
            Query.STATISTICS: notice.statistics,
            Query.LOSSES: notice.losses,
        }
        return answers[question]

    def _withdraw(self, operation: ChannelOperation[Any]) -> bool:
        if operation.kind is OperationKind.CONNECT:
            # A CONNECT leaves nothing to cancel at the channel.
            self.pending.forget(operation)
            return False
        if self.pending.withdraw(operation):
            words = wire.pack_request(RequestKind.CANCEL, operation.op_id, operation.packed_key)
            if not self._endpoint.post(self.stream, wire.REQUESTS, words):
                self.pending.forget(operation)
                return False
        return True

    # Sending

    def _begin(
        self,
        kind: OperationKind,
        key: str,
        timeout: float | None,
        decode: Decode | None,
        *,
        detached: bool,
        use_slot: bool = False,
    ) -> AnyOperation:
        """Return a new operation, registered for replies. With `use_slot` its caller polls an answer slot."""
        seconds = self._endpoint.settings.timeout if timeout is None else timeout
        op_id = next(self.pending.op_ids)
        mailbox = self.pending.mailbox if use_slot else None
        if mailbox is not None and (mailbox.small or kind is OperationKind.PUT):
            op_id = mailbox.reserve(op_id)
        operation: AnyOperation = operation_class(kind, detached=detached)(
            op_id,
            kind,
            self.name,
            key,
            seconds,
            decode,
            self._withdraw,
            self._endpoint.waits,
            # A put pipeline publishes all of its puts as one operation.
            detached=detached and kind is not OperationKind.PUT,
            mailbox=mailbox if slot_of(op_id) else None,
        )
        self.pending.add(operation, detached=detached)
        return operation

    def _issue(self, operation: AnyOperation, send: Callable[[], None]) -> None:
        """Send an operation, and poll its answer slot for a moment."""
        try:
            send()
            self.pending.watch(operation)
        except BaseException:
            # Interrupted: no caller will take its result.
            operation.cancel()
            raise
        finally:
            if operation.mailbox is not None:
                operation.mailbox.client_done(operation.op_id)

    def _ask(self, ask: RequestKind, operation: AnyOperation, weight: float = 0.0, *, wait: bool = True) -> None:
        if self.pending.closed_notice is not None:
            self._fail(operation, None)
        else:
            self._request(ask, operation, b"", weight, wait=wait)

    def _request(
        self,
        ask: RequestKind,
        operation: AnyOperation,
        head: bytes,
        weight: float,
        *,
        wait: bool = True,
        detached: bool = False,
    ) -> None:
        """Send a request without a body; a request with an item goes after the puts that are still being sent."""
        words = wire.pack_request(ask, operation.op_id, operation.packed_key, wait)
        if (head and self.stream.busy) or not self._endpoint.post(self.stream, wire.REQUESTS, words, head, weight):
            self._send(operation, Message(head, tag=wire.REQUESTS, key=words, weight=weight), detached=detached)

    def _send_large(
        self, operation: AnyOperation, encoded: Encoded, weight: float, *, wait: bool = True, detached: bool
    ) -> None:
        key = operation.packed_key
        # Without parts the pickle stream must be the body, since only a body marks a large item.
        limit = self._endpoint.settings.inline_limit if encoded.parts else 0
        words = wire.pack_request(RequestKind.PUT, operation.op_id, key, wait)
        message = Message.of(encoded, limit, tag=wire.REQUESTS, key=words, weight=weight)
        if message.body_size >= _ANNOUNCED:
            self._endpoint.post(
                self.stream, wire.REQUESTS, wire.pack_request(RequestKind.ANNOUNCE, operation.op_id, key)
            )
        self._send(operation, message, detached=detached)

    def _send(self, operation: AnyOperation, message: Message, *, detached: bool) -> None:
        if detached:
            self._send_in_background(operation, message)
            return
        work: Work[object] = Work(operation.kind, self.name, operation.seconds, self._endpoint.waits, key=operation.key)
        try:
            self._endpoint.send(self.stream, message, work)
        except CommunicationTimeoutError as late:
            # `expire` cancels it at the channel; if the message was sent after all, the channel reports its outcome.
            work.fail(late)
            operation.expire(late)
        except BaseException as error:
            work.fail(error)
            if not self._fail(operation, error):
                raise

    def _send_in_background(self, operation: AnyOperation, message: Message) -> None:
        """Send in the background; a failure fails the operation."""
        work: Work[object] = Work(operation.kind, self.name, operation.seconds, key=operation.key)
        operation.sending = work

        def sent() -> None:
            error = work.exception()
            if error is not None:
                self._fail(operation, error)

        work.add_done_callback(sent)
        self._endpoint.send_async(self.stream, message, work)

    # Asynchronous puts

    def _put_in_pipeline(self, operation: AnyOperation, encoded: Encoded, weight: float, key: str) -> None:
        item = _packed(encoded) if encoded.nbytes <= wire.SMALL else encoded
        put = QueuedPut(operation, item, weight, encoded.nbytes)
        while True:
            pipeline = self.pending.pipelines.get(key)
            if pipeline is None:
                with self._lock:
                    pipeline = self.pending.pipelines.get(key) or self._open_pipeline(key)
            if pipeline.add(put):
                return

    def _open_pipeline(self, key: str) -> PutPipeline:
        operations = self._endpoint.waits.operations
        serial = operations.begin(OperationKind.PUT, self.name, key, detached=True)

        def idle() -> None:
            operations.end(serial)
            self.pending.pipelines.pop(key, None)

        pipeline = self.pending.pipelines[key] = PutPipeline(self._send_run, idle)
        return pipeline

    def _send_run(self, run: Sequence[QueuedPut]) -> None:
        first = run[0]
        operation = first.operation
        if isinstance(first.item, Encoded):
            self._send_large(operation, first.item, first.weight, detached=True)
            return
        if len(run) == 1:
            self._request(RequestKind.PUT, operation, first.item, first.weight, detached=True)
        else:
            head = wire.pack([(put.operation.op_id, put.weight, put.item) for put in run])
            self._request(RequestKind.PUT_MANY, operation, head, 0.0, detached=True)


def _packed(encoded: Encoded) -> bytes:
    return wire.pack_item(encoded.head, encoded.parts)
