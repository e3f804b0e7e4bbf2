"""A broker and its clients, each with an endpoint of its own, in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.channel import wire
from rlinf_core.channel.boxes import LARGEST, TICKETS, Boxes, PostOffice, box_of
from rlinf_core.channel.broker import Broker
from rlinf_core.channel.channel import Channel
from rlinf_core.channel.client import ChannelClients
from rlinf_core.channel.effects import Reason
from rlinf_core.channel.memory_gate import MIB, MemoryGate
from rlinf_core.channel.outbox import Outbox
from rlinf_core.channel.pending import Pending
from rlinf_core.channel.request import Request
from rlinf_core.collective.connector import FixedConnector
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.link import Link
from rlinf_core.collective.secret import ClusterSecret
from rlinf_core.collective.settings import Settings
from rlinf_core.collective.work import Work
from rlinf_core.errors import (
    CancelledOperationError,
    ChannelClosed,
    ChannelFull,
    CommunicationTimeoutError,
    WorkerDiedError,
)
from rlinf_core.waiting import OperationKind

SETTINGS = Settings(timeout=20.0, connect_timeout=5.0, arena_bytes=32 << 20)


class Stage:
    """A channel `c` and its clients."""

    def __init__(self) -> None:
        self.secret = ClusterSecret.generate()
        self.free = 1 << 40
        self.endpoints: dict[str, Endpoint] = {}
        self.gate = MemoryGate(lambda: self.free, reserve=64 * MIB)
        self.broker = Broker("c", self.endpoint("c:0"), gate=self.gate)

    def endpoint(self, name: str) -> Endpoint:
        made = self.endpoints[name] = Endpoint(self.secret, ip="127.0.0.1", settings=SETTINGS)
        return made

    def client(self, name: str, *, tcp: bool = False) -> Channel:
        """`tcp`: as from another host."""
        card = self.endpoints["c:0"].card
        connector = FixedConnector({WorkerAddress("c", 0): replace(card, unix_path=None) if tcp else card})
        clients = ChannelClients(self.endpoint(name), WorkerAddress.from_name(name), connector)
        return Channel("c", clients.client("c"))


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    for endpoint in made.endpoints.values():
        endpoint.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def test_who_floods_a_channel_is_held_back_until_somebody_takes(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    item = bytes(30_000)
    for _ in range(300):
        producer.put(item)
    stage.free = 0
    with caplog.at_level(logging.WARNING):
        until(lambda: producer.put(item, async_op=True) and stage.gate.closed)
    assert "memory runs short: producers wait" in caplog.text
    with pytest.raises(CommunicationTimeoutError, match="memory runs short on the channel's node"):
        producer.put(item, timeout=0.1)
    with pytest.raises(ChannelFull):
        producer.put_nowait(item)
    # Who waits for something gets it all the same.
    hungry = consumer.get(key="other", async_op=True)
    until(lambda: consumer.statistics().get("other"))
    producer.put("urgent", key="other", timeout=5)
    assert hungry.wait() == "urgent"
    stage.free = 1 << 40
    stage.broker.keep_house()
    producer.put("last")
    count = producer.qsize()
    assert [consumer.get() for _ in range(count)][-1] == "last"


def test_a_client_that_comes_anew_leaves_nothing_of_its_former_life(stage: Stage) -> None:
    former = stage.client("p:0")
    works = [former.get(async_op=True) for _ in range(3)]
    until(lambda: former.statistics()["default"].waiting_gets == 3)
    present = stage.client("p:0")
    present.put(1)
    assert present.get(timeout=5) == 1
    assert present.statistics()["default"].waiting_gets == 0
    assert not any(work.done() for work in works)


def test_the_view_names_producers_and_consumers_and_what_is_there(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put(1)
    producer.put(2, key="x")
    consumer.get()
    consumer.qsize()
    view = stage.broker.view()
    assert (view.producers, view.consumers, view.maxsize) == (("p:0",), ("k:0",), 0)
    assert view.depths == {"x": 1}
    stage.endpoints["p:0"].close()
    until(lambda: _fails(consumer))
    assert stage.broker.view().producers == ("p:0",)


def _fails(channel: Channel) -> bool:
    try:
        channel.get(key="y", timeout=0.2)
    except WorkerDiedError:
        return True
    except CommunicationTimeoutError:
        return False
    return False


def test_memory_of_what_is_dropped_is_free_again(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    for _ in range(40):
        producer.put(bytearray(2 << 20))
        assert len(consumer.get()) == 2 << 20
    until(lambda: stage.endpoints["p:0"].shared_memory().used == 0)
    assert stage.gate.held < 100_000


@pytest.mark.parametrize(("from_afar", "to_afar"), [(True, True), (True, False), (False, True)])
def test_payloads_of_other_hosts_lie_with_the_channel(stage: Stage, from_afar: bool, to_afar: bool) -> None:
    producer, consumer = stage.client("p:0", tcp=from_afar), stage.client("k:0", tcp=to_afar)
    sizes = [10, 50_000, 3 << 20, 10, 6 << 20]
    for size in sizes:
        producer.put(bytearray(size), weight=1)
    assert [len(item) for item in consumer.peek_all()] == sizes
    stage.endpoints["p:0"].close()
    assert [len(item) for item in consumer.get_batch(len(sizes))] == sizes
    until(lambda: stage.endpoints["c:0"].shared_memory().used == 0)
    until(lambda: consumer.qsize() == 0 and stage.gate.held == 0)


def test_large_items_of_a_batch_come_in_their_places(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    sizes = [100_000, 1, 2, 200_000, 3]
    works = [producer.put(bytes(size), weight=1, async_op=True) for size in sizes]
    assert [len(item) for item in consumer.get_batch(5)] == sizes
    for work in works:
        work.wait()


def test_a_put_that_is_given_up_while_it_is_sent_never_arrives(stage: Stage) -> None:
    producer = stage.client("p:0")
    backend = producer._backend
    backend.connect()
    send = stage.endpoints["p:0"].send_async
    held: list[Callable[[], None]] = []
    stage.endpoints["p:0"].send_async = lambda *args: held.append(lambda: send(*args))  # type: ignore[method-assign]
    work = producer.put(bytearray(100_000), async_op=True, timeout=0.2)
    with pytest.raises(CommunicationTimeoutError):
        work.wait()
    # It leaves after all, behind the word that it shall not count.
    held[0]()
    assert producer.qsize() == 0


def test_who_has_too_little_time_to_connect_is_told_that_and_not_that_the_channel_is_unreachable(stage: Stage) -> None:
    client = stage.client("p:0")
    with pytest.raises(CommunicationTimeoutError, match="did not finish in 0 s"):
        client.put("too soon", timeout=0.0)
    client.put("in time")
    assert client.get() == "in time"


def test_a_channel_has_come_to_its_end_when_it_is_closed_and_drained(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0", tcp=True)
    producer.put("left")
    assert not stage.broker.say_farewell(), "it is open"
    consumer.close()
    assert not stage.broker.say_farewell(), "an item is left"
    assert consumer.get() == "left"
    until(stage.broker.say_farewell)
    # It is said to those who come between the farewell and the end of the process, too.
    late = stage.client("l:0")
    for each in (producer, consumer, late):
        until(lambda each=each: each.statistics())
        with pytest.raises(ChannelClosed, match="the item was not accepted"):
            each.put(1)
        with pytest.raises(ChannelClosed, match="nothing is left in it"):
            each.get()
    stage.endpoints["c:0"].close()
    for each in (producer, consumer, late):
        assert each.statistics()["default"].gets == 1
        assert (each.qsize(), each.full(), each.peek_all(), each.losses()) == (0, False, [], [])
        with pytest.raises(ChannelClosed):
            each.get_batch(1, async_op=True).wait()
        with pytest.raises(ChannelClosed):
            each.put(1, async_op=True).wait()
        each.close()


def test_memory_that_was_passed_on_keeps_a_drained_channel(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put(np.ones(4 << 20, np.uint8))
    item = consumer.get()
    consumer.close()
    assert consumer.qsize() == 0
    assert not stage.broker.say_farewell(), "its return, should the consumer die, is the channel's business"
    assert len(item) == 4 << 20
    del item
    until(stage.broker.say_farewell)


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("tcp", [False, True])
def test_an_item_that_comes_while_its_get_is_cancelled_is_got_or_goes_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, size: int, tcp: bool
) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0", tcp=tcp)
    claim, sign = Request.claim, Pending._sign
    cancelled: list[bool] = []

    def cancel(request: Request[object]) -> None:
        cancelled.append(request.fail(CancelledOperationError("given up")))

    def claim_late(self: Request[object]) -> bool:
        cancel(self)
        return claim(self)

    def sign_late(self: Pending, *of: Any) -> None:
        cancel(signs[0])
        sign(self, *of)

    with monkeypatch.context() as patch:
        patch.setattr(Request, "claim", claim_late)
        work = consumer.get(async_op=True)
        producer.put(bytes(size))
        with pytest.raises(CancelledOperationError):
            work.wait()
        until(lambda: producer.qsize() == 1)
    with monkeypatch.context() as patch:
        patch.setattr(Pending, "_sign", sign_late)
        signs = [cast("Request[object]", consumer.get(async_op=True, key="other"))]
        producer.put(bytes(size), key="other")
        assert signs[0].wait(5) == bytes(size)
    assert cancelled == [True, False]
    until(lambda: producer.statistics()["other"].gets == 1)
    assert consumer.get(timeout=5) == bytes(size)


def test_what_came_of_a_batch_that_is_given_up_takes_no_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0", tcp=True)
    for _ in range(2):
        producer.put(np.ones(1 << 20, np.uint8), weight=1)
    came: list[int] = []
    add = Request.add

    def give_up_halfway(self: Request[object], place: int, *rest: Any) -> bool:
        complete = add(self, place, *rest)
        came.append(place)
        if len(came) == 1:
            self.fail(CancelledOperationError("given up"))
        return complete

    monkeypatch.setattr(Request, "add", give_up_halfway)
    with pytest.raises(CancelledOperationError):
        consumer.get_batch(2)
    until(lambda: producer.qsize() == 2)
    until(lambda: stage.endpoints["k:0"].shared_memory().used == 0)


class Messages:
    """Counts what a channel says by messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[int] = []
        reply = Outbox.reply

        def count(outbox: Outbox, link: Link, key: bytes, head: bytes | bytearray = b"") -> None:
            self.said.append(wire.unpack_reply(key).say)
            reply(outbox, link, key, head)

        monkeypatch.setattr(Outbox, "reply", count)


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
    stage.broker.keep_house()
    producer.close()
    until(stage.broker.say_farewell)


def test_who_has_gone_to_sleep_over_its_box_is_sent_a_message(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"
    messages = Messages(monkeypatch)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(consumer.get()))
    thread.start()
    until(lambda: any(work.kind == "get" for work in stage.endpoints["k:0"].board.waiting()))
    time.sleep(0.01)  # beyond the second look
    producer.put("second")
    thread.join(10)
    assert got == ["second"]
    assert wire.Say.MAIL in messages.said


def test_what_a_note_and_an_answer_missed_of_each_other_is_seen_a_little_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"
    deliver = PostOffice.deliver

    def blind(self: PostOffice, ticket: int, slot: int, item: bytes) -> bool:
        deliver(self, ticket, slot, item)
        return False

    def answer_blind(self: PostOffice, ticket: int) -> bool:
        answer(self, ticket)
        return False

    answer = PostOffice.answer
    monkeypatch.setattr(PostOffice, "deliver", blind)
    monkeypatch.setattr(PostOffice, "answer", answer_blind)
    monkeypatch.setattr("rlinf_core.channel.pending.spin", lambda look, until: None)
    looks = iter([False, False])
    answered = Boxes.answered
    monkeypatch.setattr(Boxes, "answered", lambda self, ticket: next(looks, True) and answered(self, ticket))
    begun = time.monotonic()
    producer.put("second", timeout=10)
    looks = iter([False, False])
    assert consumer.get(timeout=10) == "second"
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("ends", ["closed", "failed", "withdrawn"])
def test_a_put_that_was_accepted_in_its_box_is_not_said_to_have_failed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"

    def overtake(look: object, until: float) -> None:
        """What the producer hears of before it looks."""
        ((_, request),) = producer._backend._pending._open.items()
        wait_for(lambda: request.boxes.answered(request.ticket))
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


def test_an_interrupted_get_leaves_its_item_to_the_next(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put("first")
    assert consumer.get() == "first"

    def interrupt(look: object, until: float) -> None:
        raise KeyboardInterrupt

    producer.put("second")
    for _ in range(2 * TICKETS):
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

    threads = [threading.Thread(target=take, args=(20,)) for _ in range(2 * TICKETS)]
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


def greeted(stage: Stage, name: str) -> Channel:
    """A client that has put and got."""
    made = stage.client(name)
    made.put("first", key="greeting")
    assert made.get("greeting") == "first"
    return made


def boxes_of(channel: Channel) -> Boxes:
    backend: Any = channel._backend
    return backend._pending.pages[backend.link].boxes


def check_nothing_is_left(channel: Channel) -> None:
    """Every box is free, and no operation is remembered."""
    backend: Any = channel._backend
    until(lambda: not backend._pending._open and not backend._pending._withdrawn)
    boxes = boxes_of(channel)
    taken = [box_of(boxes.take(number * TICKETS)) for number in range(10**6, 10**6 + TICKETS)]
    assert sorted(taken) == list(range(TICKETS))


def test_what_is_accepted_while_it_is_withdrawn_is_accepted(stage: Stage) -> None:
    producer = greeted(stage, "p:0")
    pending = cast("Any", producer._backend)._pending

    class Open(dict[int, Any]):
        """Hears of an operation just when another thread has taken it out."""

        def pop(self, ticket: int, *default: Any) -> Any:
            request = super().pop(ticket, *default)
            if request is not None and not request.settled:
                pending._accepted((ticket,))
            return request

    request = producer.put("second", async_op=True)
    request.wait()
    late = cast("Request[Any]", producer.put("third", key="held", async_op=True))
    late.wait()
    # As if it had not been heard of yet.
    late._done = False
    pending._open = Open({late.ticket: late})
    late._withdraw(late)
    assert late.settled
    assert late.result() is None


def test_a_put_that_leaves_as_its_time_ends_is_what_the_channel_says_of_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, other = greeted(stage, "p:0"), greeted(stage, "k:0")
    backend: Any = producer._backend
    wait = Work.wait

    def wait_too_long(work: Work[Any], timeout: float | None = None) -> object:
        if type(work) is not Work or work.kind != "put":
            return wait(work, timeout)
        until(other.qsize)
        raise CommunicationTimeoutError(work.operation, work.seconds)

    # A large one is on its way, so that the next one waits for its turn in the thread of the link.
    backend._under_way += 1
    started, go_on = threading.Event(), threading.Event()
    backend.link.outgoing.queue(lambda: started.set() or go_on.wait(10), Work(OperationKind.SEND, "c", 10))
    assert started.wait(10)
    monkeypatch.setattr(Work, "wait", wait_too_long)
    threading.Timer(0.05, go_on.set).start()
    producer.put("second", timeout=0.2)
    monkeypatch.undo()
    backend._under_way -= 1
    assert other.get() == "second"
    check_nothing_is_left(producer)


def test_a_call_that_is_cancelled_before_it_waits_leaves_the_item(stage: Stage) -> None:
    producer, consumer = greeted(stage, "p:0"), greeted(stage, "k:0")
    producer.put("second")

    def cancelled() -> None:
        raise CancelledOperationError("the call was cancelled")

    board = stage.endpoints["k:0"].board
    board.check, check = cancelled, board.check
    with pytest.raises(CancelledOperationError):
        consumer.get()
    board.check = check
    assert consumer.get(timeout=5) == "second"
    check_nothing_is_left(consumer)


def test_no_box_is_lost_to_a_timeout_that_is_none(stage: Stage) -> None:
    producer = greeted(stage, "p:0")
    for _ in range(TICKETS):
        with pytest.raises(ValueError, match="a timeout is a number"):
            producer.put(1, timeout=-1)
    check_nothing_is_left(producer)


@pytest.mark.parametrize("kind", [OperationKind.PUT, OperationKind.GET])
def test_who_has_a_box_of_a_connection_that_was_lost_is_answered_by_a_message(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: OperationKind
) -> None:
    client, other = greeted(stage, "k:0"), greeted(stage, "o:0")
    backend: Any = client._backend
    make = backend._request

    def lose_and_greet_anew(of: OperationKind, *args: Any, **options: Any) -> object:
        request = make(of, *args, **options)
        if of is kind:
            endpoint: Any = stage.endpoints["k:0"]
            backend._pending._open.pop(request.ticket)  # the loss comes before it is known
            endpoint._dispatcher.lost(backend.link.outgoing.connection, "lost")
            backend.connect()
            backend._pending._open[request.ticket] = request
        return request

    if kind is OperationKind.GET:
        other.put("second")
    monkeypatch.setattr(backend, "_request", lose_and_greet_anew)
    if kind is OperationKind.GET:
        assert client.get(timeout=5) == "second"
    else:
        client.put("second", timeout=5)
        assert other.get(timeout=5) == "second"
    check_nothing_is_left(client)
