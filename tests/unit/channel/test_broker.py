"""What a channel's process does with what its clients ask."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.channel import wire
from rlinf_core.channel.broker_clients import MIB, MemoryGate
from rlinf_core.channel.channel import Channel
from rlinf_core.channel.operation import ChannelFull, ChannelOperation
from rlinf_core.channel.pending import Pending
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint_info import StaticResolver
from rlinf_core.collective.message import Message
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.errors import CancelledOperationError, ChannelClosed, CommunicationTimeoutError, WorkerDiedError
from rlinf_core.waiting import OperationKind
from tests.unit.channel.conftest import Stage
from tests.waiting import until


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
    stage.broker.run_maintenance()
    producer.put("last")
    count = producer.qsize()
    assert [consumer.get() for _ in range(count)][-1] == "last"


def test_reconnected_client_starts_without_its_old_state(stage: Stage) -> None:
    former = stage.client("p:0")
    works = [former.get(async_op=True) for _ in range(3)]
    until(lambda: former.statistics()["default"].waiting_gets == 3)
    present = stage.client("p:0")
    present.put(1)
    assert present.get(timeout=5) == 1
    assert present.statistics()["default"].waiting_gets == 0
    assert not any(work.done() for work in works)


def test_late_request_of_a_predecessor_is_not_its_successors(stage: Stage) -> None:
    held, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def request(stream: PeerStream, received: ReceivedMessage) -> None:
        late = armed.is_set() and not held.is_set()
        if late:
            held.set()
            go_on.wait(20)
        stage.broker._request(stream, received)
        if late:
            done.set()

    armed = threading.Event()
    stage.endpoints["c:0"].serve(wire.REQUESTS, request)
    former = stage.client("p:0")
    former.put("first")
    armed.set()
    former.put("late", async_op=True)
    assert held.wait(20)
    present = stage.client("p:0")
    present.put("of the successor")
    go_on.set()
    assert done.wait(20)
    assert present.qsize() == 2
    assert [present.get() for _ in range(2)] == ["first", "of the successor"]


def test_reply_to_a_predecessor_is_not_its_successors(stage: Stage) -> None:
    former, producer = stage.client("p:0"), stage.client("k:0")
    work = former.get(async_op=True)
    until(lambda: producer.statistics()["default"].waiting_gets == 1)
    # Known by a message, before it asks the channel for anything.
    successor, service = stage.endpoint("p:0"), stage.endpoints["c:0"]
    me, there = WorkerAddress("p", 0), WorkerAddress("c", 0)
    came: list[bytes] = []
    successor.serve(wire.REPLIES, lambda stream, received: came.append(received.frame.key))
    CollectiveGroup(successor, me, (there,), StaticResolver({there: service.info})).send("I am here", there)
    stream = service.stream(there, me)
    until(lambda: stream.incarnation == successor.info.incarnation)
    producer.put("item")
    service.send(stream, Message(b"", tag=wire.REPLIES, key=b"last"), service.work(OperationKind.SEND, "p:0"))
    until(lambda: b"last" in came)
    assert came == [b"last"]
    assert not work.done()
    assert stage.client("p:0").get(timeout=5) == "item"


def test_view_names_producers_consumers_and_contents(stage: Stage) -> None:
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


def test_too_short_connect_deadline_is_not_called_unreachable(stage: Stage) -> None:
    client = stage.client("p:0")
    with pytest.raises(CommunicationTimeoutError, match="did not finish in 0 s"):
        client._backend.connect(0.0)
    # Who polls reaches it nevertheless.
    client.put("in time", timeout=0)
    assert client.get(timeout=0) == "in time"


def test_channel_ends_when_closed_and_drained(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0", tcp=True)
    producer.put("left")
    assert not stage.broker.announce_end(), "it is open"
    consumer.close()
    assert not stage.broker.announce_end(), "an item is left"
    assert consumer.get() == "left"
    until(stage.broker.announce_end)
    # It is said to those who come between the closed_notice and the end of the process, too.
    late = stage.client("l:0")
    for item in (producer, consumer, late):
        until(lambda item=item: item.statistics())
        with pytest.raises(ChannelClosed, match="the item was not accepted"):
            item.put(1)
        with pytest.raises(ChannelClosed, match="nothing is left in it"):
            item.get()
    stage.endpoints["c:0"].close()
    for item in (producer, consumer, late):
        assert item.statistics()["default"].gets == 1
        assert (item.qsize(), item.full(), item.peek_all(), item.losses()) == (0, False, [], [])
        with pytest.raises(ChannelClosed):
            item.get_batch(1, async_op=True).wait()
        with pytest.raises(ChannelClosed):
            item.put(1, async_op=True).wait()
        item.close()


def test_memory_that_was_passed_on_keeps_a_drained_channel(stage: Stage) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0")
    producer.put(np.ones(4 << 20, np.uint8))
    item = consumer.get()
    consumer.close()
    assert consumer.qsize() == 0
    assert not stage.broker.announce_end(), "its return, should the consumer die, is the channel's business"
    assert len(item) == 4 << 20
    del item
    until(stage.broker.announce_end)


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("tcp", [False, True])
def test_item_of_a_cancelled_get_is_received_or_returned(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, size: int, tcp: bool
) -> None:
    producer, consumer = stage.client("p:0"), stage.client("k:0", tcp=tcp)
    claim, sign = ChannelOperation.claim, Pending._sign
    cancelled: list[bool] = []

    def cancel(request: ChannelOperation[object]) -> None:
        cancelled.append(request.fail(CancelledOperationError("given up")))

    def claim_late(self: ChannelOperation[object]) -> bool:
        cancel(self)
        return claim(self)

    def sign_late(self: Pending, *of: Any) -> None:
        cancel(signs[0])
        sign(self, *of)

    with monkeypatch.context() as patch:
        patch.setattr(ChannelOperation, "claim", claim_late)
        work = consumer.get(async_op=True)
        producer.put(bytes(size))
        with pytest.raises(CancelledOperationError):
            work.wait()
        until(lambda: producer.qsize() == 1)
    with monkeypatch.context() as patch:
        patch.setattr(Pending, "_sign", sign_late)
        signs = [cast("ChannelOperation[object]", consumer.get(async_op=True, key="other"))]
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
    add = ChannelOperation.add

    def give_up_halfway(self: ChannelOperation[object], place: int, *rest: Any) -> bool:
        complete = add(self, place, *rest)
        came.append(place)
        if len(came) == 1:
            self.fail(CancelledOperationError("given up"))
        return complete

    monkeypatch.setattr(ChannelOperation, "add", give_up_halfway)
    with pytest.raises(CancelledOperationError):
        consumer.get_batch(2)
    until(lambda: producer.qsize() == 2)
    until(lambda: stage.endpoints["k:0"].shared_memory().used == 0)


class Machine:
    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self) -> int:
        return self.free


def test_gate_closes_below_the_reserve_and_reopens_above() -> None:
    machine = Machine(100 * MIB)
    gate = MemoryGate(machine, reserve=80 * MIB)
    assert not gate.add(10 * MIB)
    machine.free = 79 * MIB
    assert gate.add(5 * MIB)
    assert gate.closed
    machine.free = 99 * MIB
    assert not gate.look()
    machine.free = 100 * MIB
    assert gate.look()
    assert not gate.closed


def test_small_changes_cost_no_look() -> None:
    machine = Machine(0)
    gate = MemoryGate(machine, reserve=MIB)
    for _ in range(3):
        assert not gate.add(MIB)
    assert gate.add(MIB)
    assert gate.held == 4 * MIB


def test_empty_channel_is_open_however_little_memory_is_free() -> None:
    gate = MemoryGate(Machine(0), reserve=MIB)
    assert not gate.look()
    assert gate.add(8 * MIB)
    assert gate.add(-8 * MIB)
    assert not gate.closed
