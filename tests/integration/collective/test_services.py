"""What channels build on: services, and passing on what has arrived without a copy."""

from __future__ import annotations

import gc
import queue
from typing import Any

import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.transfer.forwarder import ForwardMode
from rlinf_core.waiting import OperationKind
from tests.waiting import until

TAG = 7


def post(side: Any, target: Any, obj: Any, key: bytes) -> None:
    from rlinf_core.waiting import OperationKind

    stream = side.endpoint.stream(side.me, target, side.resolver)
    work = side.endpoint.work(OperationKind.PUT, "channel")
    side.endpoint.send(stream, side.endpoint.message(obj, tag=7, key=key, weight=2.5), work)


def post_tensor(side: Any, target: Any, size: int, value: float) -> None:
    import torch

    from rlinf_core.waiting import OperationKind

    stream = side.endpoint.stream(side.me, target, side.resolver)
    work = side.endpoint.work(OperationKind.PUT, "channel")
    side.endpoint.send(stream, side.endpoint.message({"t": torch.full((size,), value)}, tag=7), work)


def collect(side: Any) -> None:
    """Keep what comes for the service, unopened."""
    side.kept["parcels"] = []
    side.endpoint.serve(7, lambda delivery: side.kept["parcels"].append(delivery.received))


def opened(side: Any, count: int, keep: bool) -> list[float]:
    import time  # this function travels to another process

    deadline = time.monotonic() + 10
    while len(side.kept["parcels"]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    values = [received.load() for received in side.kept["parcels"]]
    side.kept["parcels"].clear()
    if keep:
        side.kept["values"] = values
    return [float(value["t"].sum()) for value in values]


def drop(side: Any) -> None:
    side.kept.pop("values", None)


def used(side: Any) -> int:
    return side.endpoint.shared_memory().used


def test_a_service_gets_the_message_with_its_words(make_cast: Any) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    got: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, got.put)
    there.call(post, cast.here.me, {"item": [1, 2]}, b"key")
    delivery = got.get(timeout=10)
    assert (delivery.stream.peer, delivery.stream.me) == ("there:0", "here:0")
    assert (delivery.tag, delivery.key, delivery.weight) == (TAG, b"key", 2.5)
    assert delivery.received.load() == {"item": [1, 2]}


def test_a_message_for_no_service_is_dropped(make_cast: Any, caplog: pytest.LogCaptureFixture) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    there.call(post_tensor, cast.here.me, 500_000, 1.0)
    until(lambda: "`there:0` sent `here:0` a message for service 7, which is not here" in caplog.text)
    # Its memory is its sender's again, and what comes after it arrives.
    until(lambda: there.call(used) == 0)
    got: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, got.put)
    there.call(post, cast.here.me, "fine", b"")
    assert got.get(timeout=10).received.load() == "fine"


def forward_all(
    cast: Any, deliveries: Any, target: str, count: int, handover: ForwardMode = ForwardMode.MOVE
) -> list[Any]:
    here = cast.here
    stream = here.endpoint.stream(here.me, WorkerAddress.from_name(target), here.resolver)
    parcels = []
    for _ in range(count):
        received = deliveries.get(timeout=10).received
        work = here.endpoint.work(OperationKind.GET, "channel", detached=True)
        here.endpoint.forward(stream, received, work, tag=TAG, handover=handover)
        work.wait()
        parcels.append(received)
    return parcels


def test_broker_passes_on_without_a_copy(make_cast: Any) -> None:
    cast = make_cast()
    producer, consumer = cast.add("producer:0"), cast.add("consumer:0")
    consumer.call(collect)
    deliveries: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, deliveries.put)
    for value in (1.0, 2.0, 3.0):
        producer.call(post_tensor, cast.here.me, 500_000, value)
    forward_all(cast, deliveries, "consumer:0", 3)
    assert consumer.call(opened, 3, True) == [500_000, 1_000_000, 1_500_000]
    assert producer.call(used) > 0
    assert cast.here.endpoint.shared_memory().used == 0
    consumer.call(drop)
    until(lambda: producer.call(used) == 0)


def test_what_a_broker_accepted_survives_its_producer(make_cast: Any) -> None:
    cast = make_cast()
    producer, consumer = cast.add("producer:0"), cast.add("consumer:0")
    consumer.call(collect)
    deliveries: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, deliveries.put)
    producer.call(post_tensor, cast.here.me, 500_000, 4.0)
    until(lambda: not deliveries.empty())
    producer.kill()
    forward_all(cast, deliveries, "consumer:0", 1)
    assert consumer.call(opened, 1, False) == [2_000_000]


def test_a_killed_consumer_gives_back_what_was_passed_on_to_it(make_cast: Any) -> None:
    cast = make_cast()
    producer, consumer = cast.add("producer:0"), cast.add("consumer:0")
    consumer.call(collect)
    deliveries: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, deliveries.put)
    producer.call(post_tensor, cast.here.me, 500_000, 1.0)
    forward_all(cast, deliveries, "consumer:0", 1)
    assert consumer.call(opened, 1, True) == [500_000]
    consumer.kill()

    def given_back() -> bool:
        # As a channel does now and then: a connection may end a moment before its process is dead.
        cast.here.endpoint.collect()
        return producer.call(used) == 0

    until(given_back)


def test_a_broker_that_keeps_the_item_sends_a_copy(make_cast: Any) -> None:
    cast = make_cast()
    producer, consumer = cast.add("producer:0"), cast.add("consumer:0")
    consumer.call(collect)
    deliveries: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, deliveries.put)
    producer.call(post_tensor, cast.here.me, 500_000, 1.0)
    (received,) = forward_all(cast, deliveries, "consumer:0", 1, ForwardMode.COPY)
    assert consumer.call(opened, 1, False) == [500_000]
    value = received.load()
    assert isinstance(value, dict)
    assert float(value["t"].sum()) == 500_000
    del value, received
    gc.collect()
    until(lambda: producer.call(used) == 0)


def test_a_service_within_one_process(make_cast: Any) -> None:
    cast = make_cast()
    here = cast.here
    got: queue.Queue[Any] = queue.Queue()
    here.endpoint.serve(TAG, got.put)
    broker = WorkerAddress("channel", 0)
    here.resolver.endpoints[broker] = here.endpoint.info
    stream = here.endpoint.stream(here.me, broker, here.resolver)
    here.endpoint.send(
        stream, here.endpoint.message(torch.ones(100_000), tag=TAG), here.endpoint.work(OperationKind.PUT, "c")
    )
    delivery = got.get(timeout=5)
    # A broker and its consumer in one process: the received itself is handed on.
    here.endpoint.stream(broker, here.me, here.resolver)
    back = here.endpoint.stream(broker, here.me, here.resolver)
    work = here.endpoint.work(OperationKind.GET, "c", detached=True)
    here.endpoint.forward(back, delivery.received, work, tag=TAG)
    work.wait()
    assert got.get(timeout=5).received.load().sum() == 100_000
