"""Waiting for a channel's answers: in slots and by messages, interrupted, too late, and all at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from rlinf_core.channel import wire
from rlinf_core.channel.broker_clients import BrokerClient
from rlinf_core.channel.operation import ChannelOperation
from rlinf_core.channel.queue_state import Reason
from rlinf_core.channel.wire import ID_STEP, LARGEST, BrokerMailbox, ClientMailbox
from rlinf_core.collective.work import Work
from rlinf_core.errors import (
    CancelledOperationError,
    CommunicationTimeoutError,
    WorkerDiedError,
)
from rlinf_core.waiting import OperationKind
from tests.unit.channel.conftest import Stage, check_nothing_is_left, greeted
from tests.waiting import until


class Messages:
    """Counts what a channel says by messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[int] = []
        reply = BrokerClient.reply

        def count(client: BrokerClient, key: bytes, head: bytes | bytearray = b"") -> None:
            self.said.append(wire.unpack_reply(key).say)
            reply(client, key, head)

        monkeypatch.setattr(BrokerClient, "reply", count)


def test_small_items_and_their_acceptance_go_through_boxes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"
    # However long it takes.
    monkeypatch.setattr("rlinf_core.channel.pending.spin", lambda look, _: until(look) or True)
    messages = Messages(monkeypatch)
    for number in range(50):
        producer.put({"number": number})
    assert [consumer.get()["number"] for _ in range(50)] == list(range(50))
    assert messages.said == []
    figures = producer.statistics()["default"]
    assert (figures.puts, figures.gets) == (51, 51)
    stage.broker.run_maintenance()
    producer.close()
    until(stage.broker.announce_end)


def test_who_has_gone_to_sleep_over_its_box_is_sent_a_message(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"
    messages = Messages(monkeypatch)
    asleep = threading.Event()
    request_wakeup = ClientMailbox.request_wakeup

    def leave_note_and_tell(slots: ClientMailbox, op_id: int) -> None:
        request_wakeup(slots, op_id)
        asleep.set()

    monkeypatch.setattr(ClientMailbox, "request_wakeup", leave_note_and_tell)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(consumer.get()))
    thread.start()
    assert asleep.wait(10)
    producer.put("second")
    thread.join(10)
    assert got == ["second"]
    assert wire.ReplyKind.MAIL in messages.said


def test_missed_notice_and_answer_are_seen_a_little_later(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"
    deliver = BrokerMailbox.write_item

    def blind(self: BrokerMailbox, op_id: int, ack_slot: int, item: bytes) -> bool:
        deliver(self, op_id, ack_slot, item)
        return False

    def answer_blind(self: BrokerMailbox, op_id: int) -> bool:
        answer(self, op_id)
        return False

    answer = BrokerMailbox.write_answer
    monkeypatch.setattr(BrokerMailbox, "write_item", blind)
    monkeypatch.setattr(BrokerMailbox, "write_answer", answer_blind)
    monkeypatch.setattr("rlinf_core.channel.pending.spin", lambda look, until: None)
    # Here the answer is not merely invisible for a moment: it has to come first, on a busy machine too.
    monkeypatch.setattr("rlinf_core.channel.pending._VISIBLE_AFTER", 1.0)
    looks = iter([False, False])
    answered = ClientMailbox.answered
    monkeypatch.setattr(ClientMailbox, "answered", lambda self, op_id: next(looks, True) and answered(self, op_id))
    producer.put("second", timeout=10)
    looks = iter([False, False])
    assert consumer.get(timeout=10) == "second"


@pytest.mark.parametrize("ends", ["closed", "failed", "withdrawn"])
def test_put_accepted_in_its_box_never_reports_failure(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"

    def overtake(look: object, until: float) -> None:
        """What the producer hears of before it looks."""
        ((_, request),) = producer._backend.pending._open.items()
        wait_for(lambda: request.mailbox.answered(request.op_id))
        if ends == "closed":
            request.refuse(Reason.CLOSED, "")
        elif ends == "failed":
            request.fail(CancelledOperationError("given up"))
        else:
            request.expire(CommunicationTimeoutError("put", 0.0))

    wait_for = until
    monkeypatch.setattr("rlinf_core.channel.pending.spin", overtake)
    producer.put("second")
    monkeypatch.undo()
    assert consumer.get() == "second"
    check_nothing_is_left(producer)


def test_an_interrupted_get_leaves_its_item_to_the_next(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"

    def interrupt(look: object, until: float) -> None:
        raise KeyboardInterrupt

    producer.put("second")
    for _ in range(2 * ID_STEP):
        with monkeypatch.context() as patch:
            patch.setattr("rlinf_core.channel.pending.spin", interrupt)
            with pytest.raises(KeyboardInterrupt):
                consumer.get()
    assert consumer.get() == "second"
    until(lambda: producer.statistics()["default"].gets == 2)


def test_more_threads_than_boxes_get_each_item_once(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    got: list[int] = []

    def take(count: int) -> None:
        got.extend([consumer.get(timeout=10) for _ in range(count)])

    threads = [threading.Thread(target=take, args=(20,)) for _ in range(2 * ID_STEP)]
    for thread in threads:
        thread.start()
    for number in range(20 * len(threads)):
        producer.put(number)
    for thread in threads:
        thread.join(20)
    assert sorted(got) == list(range(20 * len(threads)))


def test_large_and_small_items_take_turns(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    sizes = [10, 2000, LARGEST - 100, LARGEST + 1, 40_000, 1 << 20, 10, 10, 5000, 10]
    for size in sizes:
        producer.put(bytes(size))
    assert [len(consumer.get(timeout=10)) for _ in sizes] == sizes


def test_what_is_accepted_while_it_is_withdrawn_is_accepted(stage: Stage) -> None:
    producer = greeted(stage, "p:0")
    pending = cast("Any", producer._backend).pending

    class Open(dict[int, Any]):
        """Hears of an operation just when another thread has taken it out."""

        def pop(self, op_id: int, *default: Any) -> Any:
            request = super().pop(op_id, *default)
            if request is not None and not request.settled:
                pending._accepted((op_id,))
            return request

    request = producer.put("second", async_op=True)
    request.wait()
    late = cast("ChannelOperation[Any]", producer.put("third", key="held", async_op=True))
    late.wait()
    # As if it had not been heard of yet.
    late._done = False
    pending._open = Open({late.op_id: late})
    late._withdraw(late)
    assert late.settled
    assert late.result() is None


def test_put_that_expires_on_its_way_gets_the_channels_verdict(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, other = greeted(stage, "p:0"), greeted(stage, "k:0")
    backend: Any = producer._backend
    wait = Work.wait

    def wait_too_long(work: Work[Any], timeout: float | None = None) -> object:
        if type(work) is not Work or work.kind != "put":
            return wait(work, timeout)
        until(other.qsize)
        raise CommunicationTimeoutError(work.title, work.seconds)

    # A large one is on its way, so that the next one waits for its turn in the thread of the stream.
    started, go_on = threading.Event(), threading.Event()
    backend.stream.queue(lambda: started.set() or go_on.wait(10), Work(OperationKind.SEND, "c", 10))
    assert started.wait(10)
    monkeypatch.setattr(Work, "wait", wait_too_long)
    threading.Timer(0.05, go_on.set).start()
    producer.put("second", timeout=10)
    monkeypatch.undo()
    assert other.get() == "second"
    check_nothing_is_left(producer)


def test_call_cancelled_before_it_waits_leaves_the_item(stage: Stage) -> None:
    producer, consumer = greeted(stage, "p:0"), greeted(stage, "k:0")
    producer.put("second")

    def cancelled() -> None:
        raise CancelledOperationError("the call was cancelled")

    board = stage.endpoints["k:0"].waits
    board.check, check = cancelled, board.check
    with pytest.raises(CancelledOperationError):
        consumer.get()
    board.check = check
    assert consumer.get(timeout=5) == "second"
    check_nothing_is_left(consumer)


def test_no_box_is_lost_to_a_timeout_that_is_none(stage: Stage) -> None:
    producer = greeted(stage, "p:0")
    for _ in range(ID_STEP):
        with pytest.raises(ValueError, match="a timeout is a number"):
            producer.put(1, timeout=-1)
    check_nothing_is_left(producer)


@pytest.mark.parametrize("kind", [OperationKind.PUT, OperationKind.GET])
def test_box_of_a_lost_connection_is_answered_by_a_message(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: OperationKind
) -> None:
    client, other = greeted(stage, "k:0"), greeted(stage, "o:0")
    backend: Any = client._backend
    make = backend._begin

    def lose_and_greet_anew(of: OperationKind, *args: Any, **options: Any) -> object:
        request = make(of, *args, **options)
        if of is kind:
            endpoint: Any = stage.endpoints["k:0"]
            backend.pending._open.pop(request.op_id)  # the loss comes before it is known
            endpoint._connection_lost(backend.stream.connection, "lost")
            backend.connect()
            backend.pending._open[request.op_id] = request
        return request

    if kind is OperationKind.GET:
        other.put("second")
    monkeypatch.setattr(backend, "_begin", lose_and_greet_anew)
    if kind is OperationKind.GET:
        assert client.get(timeout=5) == "second"
    else:
        client.put("second", timeout=5)
        assert other.get(timeout=5) == "second"
    check_nothing_is_left(client)


def test_memory_that_was_shared_with_a_channel_goes_with_it(stage: Stage) -> None:
    client = greeted(stage, "p:0")
    pending = cast("Any", client._backend).pending
    shared = weakref.ref(pending.mailbox)
    stage.endpoints["c:0"].close()
    until(lambda: shared() is None)
    with pytest.raises(WorkerDiedError):
        client.get(timeout=5)


def test_interrupted_put_leaves_its_item_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = greeted(stage, "p:0"), greeted(stage, "k:0")

    def interrupt(look: Callable[[], object], _: float) -> None:
        until(look)
        raise KeyboardInterrupt

    monkeypatch.setattr("rlinf_core.channel.pending.spin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        producer.put("second")
    monkeypatch.undo()
    assert consumer.get() == "second"
    check_nothing_is_left(producer)


def test_unawaited_operation_ends_though_its_channel_is_gone(stage: Stage) -> None:
    client = greeted(stage, "k:0")
    request = cast("ChannelOperation[Any]", client.get(async_op=True, timeout=0.05))
    stream = cast("Any", client._backend).stream
    stream.connection, kept = None, stream.connection
    until(lambda: request.settled)
    stream.connection = kept
    with pytest.raises(CommunicationTimeoutError, match="get on channel `c`"):
        request.wait()


def test_what_nobody_waits_in_fails_when_its_process_leaves(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    client = greeted(stage, "p:0")
    put, get = client.put("item", key="a", async_op=True), client.get(key="b", async_op=True)
    batch = client.get_batch(3, key="c", async_op=True)
    put.wait()
    stage.endpoints["p:0"].close()
    for handle in (get, batch):
        with pytest.raises(CancelledOperationError, match="the endpoint was closed"):
            handle.wait()
    assert put.done()
    assert caplog.text == ""
