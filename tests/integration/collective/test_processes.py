"""What only two processes show: values and tensors between them, broadcasts, services, other interpreters."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import PayloadError
from rlinf_core.waiting import OperationKind
from tests.integration.collective.conftest import THERE, echo
from tests.waiting import until


def round_trip(duo: Any, obj: object) -> Any:
    here, there = duo
    group = here.group()
    there.begin(echo, 1)
    group.send(obj, THERE)
    back = group.recv(THERE)
    there.result()
    return back


def test_objects_and_unusual_tensors_come_back(duo: Any) -> None:
    objects = [None, "text", b"x" * 100_000, {"a": [1, (2, 3)], "b": {4}}, OrderedDict(x=1), list(range(20_000))]
    for one, other in zip(objects, round_trip(duo, objects), strict=True):
        assert (other, type(other)) == (one, type(one))
    leaf = torch.ones(3, requires_grad=True)
    tensors = {
        "zero-dimensional": torch.tensor(7.0),
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "strided": torch.arange(100_000).reshape(100, 1000).t()[::2],
        "gradient": leaf * 2,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "array": np.arange(12).reshape(3, 4)[:, ::2],
        "large array": np.ones((1000, 1000)),
    }
    back = round_trip(duo, tensors)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape, name
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(back[name], tensor.detach()), name
            assert not back[name].requires_grad
        else:
            assert np.array_equal(back[name], tensor), name
            back[name][0] = 5


def test_what_is_no_buffer_is_refused(duo: Any) -> None:
    here, _ = duo
    with pytest.raises(PayloadError, match="fills a tensor or an array, not a `list`"):
        here.group().recv_tensor([1, 2], THERE)


Point = namedtuple("Point", "x y")


def test_within_one_process_the_receiver_gets_a_copy(duo: Any) -> None:
    here, _ = duo
    me = WorkerAddress("here", 0)
    group = here.group()
    for size in (10, 500_000):
        tensor = torch.zeros(size)
        group.send(Point(tensor, "y"), me)
        tensor.fill_(1)
        back = group.recv(me)
        assert isinstance(back, Point)
        assert back.x.sum() == 0
        buffer = torch.zeros(size)
        group.send_tensor(tensor, me)
        group.recv_tensor(buffer, me)
        assert buffer.sum() == size


def test_a_view_that_is_dropped_is_free_at_once(duo: Any) -> None:
    here, there = duo

    def send(side: Any) -> int:
        import torch

        before = side.endpoint.shared_memory().used
        side.group().send({"nested": [torch.ones(500_000)]}, WorkerAddress("here", 0))
        return before

    def used(side: Any) -> int:
        return side.endpoint.shared_memory().used

    before = there.call(send)
    # No garbage collection in between: nothing may hold the message in a cycle.
    gc.disable()
    try:
        value = here.group().recv(THERE)
        assert there.call(used) > before
        del value
        assert there.call(used) == before
    finally:
        gc.enable()


@pytest.mark.nightly
def test_later_broadcast_hides_writes_to_an_earlier_one(make_cast: Any) -> None:
    cast = make_cast()
    peers = [cast.add(f"rollout:{rank}") for rank in range(1, 3)]

    def scribble(side: Any, rounds: int) -> list[float]:
        source = WorkerAddress("here", 0)
        sums = []
        for _ in range(rounds):
            tensor = side.group().broadcast(None, source)
            sums.append(float(tensor.sum()))
            tensor[::1000] = -1.0
            del tensor
            side.group().send(None, source)
        return sums

    for peer in peers:
        peer.begin(scribble, 5)
    group = cast.here.group()
    for number in range(5):
        group.broadcast(torch.full((500_000,), float(number)), cast.here.me)
        for rank in range(1, 3):
            group.recv(WorkerAddress("rollout", rank))
    assert [peer.result() for peer in peers] == [[500_000.0 * number for number in range(5)]] * 2


TAG = 7


def post_tensor(side: Any, target: Any, size: int, value: float) -> None:
    import torch

    from rlinf_core.waiting import OperationKind

    stream = side.endpoint.stream(side.me, target, side.resolver)
    work = side.endpoint.work(OperationKind.PUT, "channel")
    side.endpoint.send(stream, side.endpoint.message({"t": torch.full((size,), value)}, tag=7), work)


def collect(side: Any) -> None:
    """Keep what comes for the service, unopened."""
    side.kept["parcels"] = []
    side.endpoint.serve(7, lambda stream, received: side.kept["parcels"].append(received))


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


def test_a_message_for_no_service_is_dropped(make_cast: Any, caplog: pytest.LogCaptureFixture) -> None:
    cast = make_cast()
    there = cast.add("there:0")
    there.call(post_tensor, cast.here.me, 500_000, 1.0)
    until(lambda: "`there:0` sent `here:0` a message for service 7, which is not here" in caplog.text)
    # Its memory is its sender's again, and what comes after it arrives.
    until(lambda: there.call(used) == 0)
    got: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, lambda *delivery: got.put(delivery))
    there.call(post_tensor, cast.here.me, 10, 3.0)
    assert float(got.get(timeout=10)[1].load()["t"].sum()) == 30


def forward_all(cast: Any, deliveries: Any, target: str, count: int, *, lend: bool = True) -> list[Any]:
    here = cast.here
    stream = here.endpoint.stream(here.me, WorkerAddress.from_name(target), here.resolver)
    parcels = []
    for _ in range(count):
        received = deliveries.get(timeout=10)[1]
        work = here.endpoint.work(OperationKind.GET, "channel", detached=True)
        here.endpoint.forward(stream, received, work, tag=TAG, lend=lend)
        work.wait()
        if lend:
            here.endpoint.release_lent(stream, received)
        parcels.append(received)
    return parcels


def brokered(make_cast: Any) -> tuple[Any, Any, Any, queue.Queue[Any]]:
    """Return a cast, its producer and its consumer, and what is delivered to this process between them."""
    cast = make_cast()
    producer, consumer = cast.add("producer:0"), cast.add("consumer:0")
    consumer.call(collect)
    deliveries: queue.Queue[Any] = queue.Queue()
    cast.here.endpoint.serve(TAG, lambda *delivery: deliveries.put(delivery))
    return cast, producer, consumer, deliveries


def test_broker_passes_on_without_a_copy(make_cast: Any) -> None:
    cast, producer, consumer, deliveries = brokered(make_cast)
    for value in (1.0, 2.0, 3.0):
        producer.call(post_tensor, cast.here.me, 500_000, value)
    forward_all(cast, deliveries, "consumer:0", 3)
    assert consumer.call(opened, 3, True) == [500_000, 1_000_000, 1_500_000]
    assert producer.call(used) > 0
    assert cast.here.endpoint.shared_memory().used == 0
    consumer.call(drop)
    until(lambda: producer.call(used) == 0)


def test_what_a_broker_accepted_survives_its_producer(make_cast: Any) -> None:
    cast, producer, consumer, deliveries = brokered(make_cast)
    producer.call(post_tensor, cast.here.me, 500_000, 4.0)
    until(lambda: not deliveries.empty())
    producer.kill()
    forward_all(cast, deliveries, "consumer:0", 1)
    assert consumer.call(opened, 1, False) == [2_000_000]


def test_a_killed_consumer_gives_back_what_was_passed_on_to_it(make_cast: Any) -> None:
    cast, producer, consumer, deliveries = brokered(make_cast)
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
    cast, producer, consumer, deliveries = brokered(make_cast)
    producer.call(post_tensor, cast.here.me, 500_000, 1.0)
    (received,) = forward_all(cast, deliveries, "consumer:0", 1, lend=False)
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
    here.endpoint.serve(TAG, lambda *delivery: got.put(delivery))
    broker = WorkerAddress("channel", 0)
    here.resolver.endpoints[broker] = here.endpoint.info
    stream = here.endpoint.stream(here.me, broker, here.resolver)
    here.endpoint.send(
        stream, here.endpoint.message(torch.ones(100_000), tag=TAG), here.endpoint.work(OperationKind.PUT, "c")
    )
    _, received = got.get(timeout=5)
    # A broker and its consumer in one process.
    here.endpoint.stream(broker, here.me, here.resolver)
    back = here.endpoint.stream(broker, here.me, here.resolver)
    work = here.endpoint.work(OperationKind.GET, "c", detached=True)
    here.endpoint.forward(back, received, work, tag=TAG, lend=True)
    work.wait()
    assert got.get(timeout=5)[1].load().sum() == 100_000


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with no packages at all."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return str(place / "bin" / "python")


def test_a_side_without_torch_talks_and_says_what_it_cannot_hold(make_cast: Any, bare: str) -> None:
    cast = make_cast()
    there = cast.add("there:0", interpreter=bare)

    def converse(side: Any) -> str:
        import sys

        here = WorkerAddress("here", 0)
        group = side.group()
        group.send(group.recv(here), here)
        try:
            group.recv(here)
        except Exception as error:
            group.send(bytearray(300_000), here)
            return f"{type(error).__name__} {error} {'torch' in sys.modules}"
        return "it arrived"

    there.begin(converse)
    group = cast.here.group()
    group.send({"text": "x" * 100_000, "bytes": b"y" * 100_000}, THERE)
    assert group.recv(THERE)["bytes"] == b"y" * 100_000
    group.send(torch.ones(100_000), THERE)
    assert len(group.recv(THERE)) == 300_000
    said = there.result()
    assert said.startswith(PayloadError.__name__)
    assert bare in said
    assert said.endswith("False")
