"""What the users of a channel may rely on: on its own host, on another one, and within one process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.channel.channel import Channel
from rlinf_core.channel.operation import ChannelEmpty, ChannelFull
from rlinf_core.errors import (
    CancelledOperationError,
    ChannelClosed,
    CommunicationTimeoutError,
    PayloadError,
    WorkerDiedError,
)
from tests.unit.channel.conftest import Stage
from tests.waiting import in_thread, until

KINDS = ("of a job", "of another host", "local")
# Packed into a frame, at the limit, a message of their own, announced.
SIZES = (0, 10, 900, 5000, 32 << 10, 40_000, 1 << 20, 5 << 20)


class Ends:
    """A producer and a consumer of one channel."""

    def __init__(self, kind: str, maxsize: int = 0) -> None:
        self.stage = Stage(maxsize)
        if kind == "local":
            self.producer = self.consumer = Channel.create("c", maxsize, local=True)
        else:
            tcp = kind == "of another host"
            self.producer, self.consumer = self.stage.client("p:0", tcp=tcp), self.stage.client("k:0", tcp=tcp)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_ends(kind: str) -> Any:
    made: list[Ends] = []

    def make(maxsize: int = 0) -> Ends:
        made.append(Ends(kind, maxsize))
        return made[-1]

    yield make
    for ends in made:
        ends.stage.close()


@pytest.fixture
def ends(make_ends: Callable[..., Ends]) -> Ends:
    return make_ends()


def waiting(channel: Channel, key: str = "default") -> int:
    figures = channel.statistics().get(key)
    return 0 if figures is None else figures.waiting_gets + figures.waiting_puts


# Order and contents


def test_items_of_every_size_keep_the_order_of_their_puts(ends: Ends) -> None:
    dice = random.Random(2)
    sizes = [dice.choice(SIZES) for _ in range(40)]
    works = []
    for number, size in enumerate(sizes):
        if number % 3:
            works.append(ends.producer.put((number, bytes(size)), async_op=True))
        else:
            ends.producer.put((number, bytes(size)))
    got = [ends.consumer.get() for _ in sizes]
    assert [(number, len(data)) for number, data in got] == list(enumerate(sizes))
    for work in works:
        work.wait()


def test_keys_are_queues_of_their_own(ends: Ends) -> None:
    keys = ("", "default", 3, 3.5, None, b"k", ("a", 1), "ключ")
    for key in keys:
        ends.producer.put(("item", key), key=key)
    for key in reversed(keys):
        assert ends.consumer.get(key) == ("item", key)
    ends.producer.put("one", key=1)
    assert ends.consumer.get(1.0) == "one"
    statistics = ends.consumer.statistics()
    assert {key: statistics[key].gets for key in keys} == dict.fromkeys(keys, 1)


def test_waiters_are_served_first_come(ends: Ends) -> None:
    early = ends.consumer.get(async_op=True)
    until(lambda: waiting(ends.producer) == 1)
    late = ends.consumer.get(async_op=True)
    until(lambda: waiting(ends.producer) == 2)
    ends.producer.put("first")
    ends.producer.put("second")
    assert (early.wait(), late.wait()) == ("first", "second")


def test_tensors_are_the_consumers_own(ends: Ends, kind: str) -> None:
    for size in (0, 100, 50_000, 1 << 20):
        tensor = torch.full((size,), 4, dtype=torch.uint8)
        ends.producer.put({"t": [tensor]})
        if kind != "local":
            tensor.fill_(9)
        got = ends.consumer.get()["t"][0]
        assert bool((got == 4).all())
        got.fill_(1)


def test_threads_get_each_item_once(ends: Ends) -> None:
    got: list[int] = []
    threads = [in_thread(lambda: got.extend([ends.consumer.get() for _ in range(15)]))[0] for _ in range(20)]
    for number in range(300):
        ends.producer.put(number, async_op=number % 2 > 0)
    for thread in threads:
        thread.join(20)
    assert sorted(got) == list(range(300))


def test_peeking_copies_and_takes_nothing(ends: Ends) -> None:
    for size in SIZES:
        ends.producer.put(bytes(size))
    assert [len(item) for item in ends.consumer.peek_all()] == list(SIZES)
    assert ends.consumer.qsize() == len(SIZES)
    assert [len(ends.consumer.get()) for _ in SIZES] == list(SIZES)
    assert ends.consumer.empty()


def test_a_timeout_of_nothing_takes_what_is_there(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(1)
    for size in SIZES:
        ends.producer.put(bytes(size), weight=1, timeout=0)
        with pytest.raises(CommunicationTimeoutError, match="did not finish in 0 s"):
            ends.producer.put("too much", timeout=0)
        assert len(ends.consumer.get(timeout=0)) == size
        with pytest.raises(CommunicationTimeoutError, match="did not finish in 0 s"):
            ends.consumer.get(timeout=0)
        ends.producer.put(bytes(size), weight=1)
        with pytest.raises(CommunicationTimeoutError, match="a batch of weight 2 was asked for, 1 items"):
            ends.consumer.get_batch(2, timeout=0)
        assert [len(item) for item in ends.consumer.get_batch(1, timeout=0)] == [size]
    with pytest.raises(CommunicationTimeoutError, match="did not finish in 0 s"):
        ends.consumer.get(timeout=0, async_op=True).wait()


def test_what_cannot_be_put_is_refused_and_harms_nothing(ends: Ends, kind: str) -> None:
    if kind != "local":
        with pytest.raises(PayloadError, match="cannot be pickled"):
            ends.producer.put(threading.Lock())
    for weight in (-1, float("nan"), "3"):
        with pytest.raises(ValueError, match="weight"):
            ends.producer.put(1, weight=weight)
    for timeout in (-1, float("inf"), "3"):
        with pytest.raises(ValueError, match="a timeout is a number"):
            ends.producer.put(1, timeout=timeout)
    with pytest.raises(TypeError, match="a key is text"):
        ends.producer.put(1, key=object())
    ends.producer.put("fine")
    assert ends.consumer.get() == "fine"


# Weights


def test_a_batch_weighs_what_was_asked_without_gaps(ends: Ends) -> None:
    batch = ends.consumer.get_batch(4, async_op=True)
    until(lambda: waiting(ends.producer) == 1)
    behind = ends.consumer.get(async_op=True)
    until(lambda: waiting(ends.producer) == 2)
    for item, weight in (("a", 2), ("b", 0), ("c", 3), ("d", 1)):
        ends.producer.put(item, weight=weight)
    assert batch.wait() == ["a", "b", "c"]
    assert behind.wait() == "d"


def test_large_items_of_a_batch_come_in_their_places(ends: Ends) -> None:
    works = [ends.producer.put(bytes(size), weight=1, async_op=True) for size in SIZES * 2]
    assert [len(item) for item in ends.consumer.get_batch(2 * len(SIZES))] == list(SIZES * 2)
    for work in works:
        work.wait()


def test_a_batch_may_weigh_more_than_a_bounded_queue_holds(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(2)
    batch = ends.consumer.get_batch(6, async_op=True)
    until(lambda: waiting(ends.producer) == 1)
    for number in range(6):
        ends.producer.put(number, weight=1)
    assert batch.wait() == list(range(6))


# Full and empty


def state(kind: str, words: str) -> str:
    """What an operation that is late says of the queue; that of a local channel says nothing of it."""
    return "did not finish" if kind == "local" else words


def test_a_full_key_holds_its_producer_back_and_nobody_else(make_ends: Callable[..., Ends], kind: str) -> None:
    ends = make_ends(2)
    works = [ends.producer.put(number, async_op=True) for number in range(5)]
    until(lambda: ends.consumer.full() and ends.consumer.statistics()["default"].waiting_puts)
    assert (ends.consumer.qsize(), ends.consumer.maxsize) == (2, 2)
    with pytest.raises(ChannelFull, match="channel `c` is full"):
        ends.producer.put_nowait("no room")
    with pytest.raises(CommunicationTimeoutError, match=state(kind, "the queue is full: it holds 2 items of 2")):
        ends.producer.put("no room", timeout=0.05)
    ends.producer.put("elsewhere", key="other")
    assert ends.consumer.get_nowait("other") == "elsewhere"
    assert [ends.consumer.get() for _ in range(5)] == list(range(5))
    for work in works:
        work.wait()


def test_an_empty_key_says_so(ends: Ends, kind: str) -> None:
    with pytest.raises(ChannelEmpty, match="channel `c` is empty"):
        ends.consumer.get_nowait()
    with pytest.raises(CommunicationTimeoutError, match=state(kind, "the queue is empty")):
        ends.consumer.get(timeout=0.05)
    ends.producer.put("light")
    with pytest.raises(CommunicationTimeoutError, match="of weight 0, which adds nothing"):
        ends.consumer.get_batch(1, timeout=0.05)
    assert ends.consumer.get_nowait() == "light"


def test_operation_without_a_waiter_ends_at_its_deadline(ends: Ends) -> None:
    assert ends.consumer.empty()  # connected: what follows has hardly any time
    handles = [ends.consumer.get(async_op=True, timeout=0.05), ends.consumer.get_batch(9, async_op=True, timeout=0.05)]
    until(lambda: all(handle.done() for handle in handles))
    ends.producer.put("kept")
    assert ends.consumer.get() == "kept"
    for handle in handles:
        with pytest.raises(CommunicationTimeoutError):
            handle.wait()


def test_task_that_gets_too_late_hears_it_from_the_channel(ends: Ends) -> None:
    async def get() -> Any:
        return await ends.consumer.get(async_op=True, timeout=0.05)

    with pytest.raises(CommunicationTimeoutError, match=r"`get on channel `c`` did not finish in 0\.05 s"):
        asyncio.run(get())
    ends.producer.put("kept")
    assert ends.consumer.get(timeout=10) == "kept"


def test_operation_without_a_limit_has_the_environments(ends: Ends, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "local":
        pytest.skip("its endpoint read the environment before")
    monkeypatch.setenv("RLINF_TIMEOUT", "0.05")
    with pytest.raises(CommunicationTimeoutError, match=r"in 0\.05 s"):
        ends.consumer.get()


def test_what_a_late_batch_had_reserved_goes_back(ends: Ends) -> None:
    ends.producer.put("a", weight=1)
    assert ends.consumer.qsize() == 1  # connected
    with pytest.raises(CommunicationTimeoutError, match="1 items of weight 1 were there"):
        ends.consumer.get_batch(2, timeout=0.05)
    assert ends.consumer.get() == "a"


# Giving up


def test_interrupted_get_leaves_its_item_to_the_next(ends: Ends) -> None:
    def interrupt() -> None:
        until(lambda: waiting(ends.producer) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    for _ in range(3):
        thread, _ = in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ends.consumer.get()
        thread.join(10)
        until(lambda: not waiting(ends.producer))
    ends.producer.put("kept")
    assert ends.consumer.get() == "kept"


def test_cancelled_task_leaves_its_item_to_the_next(ends: Ends) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(ends.consumer.get(async_op=True).async_wait())
        await asyncio.to_thread(until, lambda: waiting(ends.producer) == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    until(lambda: not waiting(ends.producer))
    ends.producer.put("kept")
    assert ends.consumer.get() == "kept"


def test_operation_that_fails_from_outside_leaves_its_item(ends: Ends) -> None:
    handle = ends.consumer.get(async_op=True)
    until(lambda: waiting(ends.producer) == 1)
    handle.fail(CancelledOperationError("given up"))
    with pytest.raises(CancelledOperationError):
        handle.wait()
    until(lambda: not waiting(ends.producer))
    ends.producer.put("kept")
    assert ends.consumer.get() == "kept"


def test_waits_for_a_channel_are_published_and_can_be_failed(make_ends: Callable[..., Ends], kind: str) -> None:
    if kind == "local":
        pytest.skip("nobody else can wake who waits in its own process")
    ends = make_ends()
    thread, outcome = in_thread(ends.consumer.get, key="k")
    waits = ends.stage.endpoints["k:0"].waits
    until(lambda: [work.title for work in waits.waiting()] == ["get on channel `c`, key `k`"])
    error = CancelledOperationError("the call was cancelled")
    waits.fail_task(None, error)
    thread.join(10)
    assert outcome == [error]
    assert not waits.operations.publication().operations
    until(lambda: not waiting(ends.producer, "k"))


def test_call_that_is_cancelled_before_it_waits_leaves_the_item(make_ends: Callable[..., Ends], kind: str) -> None:
    if kind == "local":
        pytest.skip("nothing is published")
    ends = make_ends()
    ends.consumer.qsize()

    def cancelled() -> None:
        raise CancelledOperationError("the call was cancelled")

    waits = ends.stage.endpoints["k:0"].waits
    waits.check, check = cancelled, waits.check
    with pytest.raises(CancelledOperationError):
        ends.consumer.get()
    waits.check = check
    ends.producer.put("kept")
    assert ends.consumer.get(timeout=5) == "kept"


def test_more_puts_than_fit_on_the_way_are_all_accepted(ends: Ends) -> None:
    count = 3000
    works = [ends.producer.put(number, weight=1, async_op=True) for number in range(count)]
    assert ends.consumer.get_batch(count) == list(range(count))
    for work in works:
        work.wait()


# The end


def test_a_closed_channel_is_drained_and_takes_no_more(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(3)
    for number in range(3):
        ends.producer.put(number, weight=1)
    blocked = ends.producer.put("blocked", async_op=True)
    until(lambda: waiting(ends.producer) == 1)
    ends.consumer.close()
    with pytest.raises(ChannelClosed, match="is closed, the item was not accepted"):
        blocked.wait()
    with pytest.raises(ChannelClosed, match="is closed, the item was not accepted"):
        ends.producer.put("late")
    assert ends.consumer.get_batch(100) == [0, 1, 2]
    assert list(ends.consumer) == []
    with pytest.raises(ChannelClosed, match="is closed, and nothing is left in it"):
        ends.consumer.get()
    ends.producer.close()


def test_iterating_ends_with_the_channel(ends: Ends) -> None:
    for number in range(3):
        ends.producer.put(number)
    ends.producer.close()

    async def collect() -> list[int]:
        return [item async for item in ends.consumer]

    assert asyncio.run(collect()) == [0, 1, 2]
    assert list(ends.consumer) == []


def test_what_nobody_waits_in_fails_when_its_process_leaves(
    make_ends: Callable[..., Ends], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "local":
        pytest.skip("its process is this one")
    ends = make_ends()
    put = ends.consumer.put("item", key="a", async_op=True)
    handles = [ends.consumer.get(key="b", async_op=True), ends.consumer.get_batch(3, key="c", async_op=True)]
    put.wait()
    ends.stage.endpoints["k:0"].close()
    for handle in handles:
        with pytest.raises(CancelledOperationError, match="the endpoint was closed"):
            handle.wait()
    assert put.done()
    assert caplog.text == ""


def test_items_survive_their_producer_and_a_lost_consumer(make_ends: Callable[..., Ends], kind: str) -> None:
    if kind == "local":
        pytest.skip("its ends are in one process")
    ends = make_ends()
    for size in SIZES:
        ends.producer.put(bytes(size), weight=1)
    doomed = ends.stage.client("d:0")
    batch = doomed.get_batch(100, async_op=True)
    until(lambda: waiting(ends.consumer) == 1)
    ends.stage.endpoints["d:0"].close(linger=0.0)
    ends.stage.endpoints["p:0"].close(linger=0.0)
    assert [len(ends.consumer.get()) for _ in SIZES] == list(SIZES)
    assert ends.consumer.losses() == []
    with pytest.raises(CancelledOperationError):
        batch.wait()
    with pytest.raises(WorkerDiedError, match="p:0"):
        ends.consumer.get()


def test_operations_fail_when_the_channels_process_ends(make_ends: Callable[..., Ends], kind: str) -> None:
    if kind == "local":
        pytest.skip("its process is this one")
    ends = make_ends(1)
    ends.producer.put("there")
    blocked = ends.producer.put("blocked", async_op=True)
    thread, outcome = in_thread(ends.consumer.get, key="empty")
    until(lambda: waiting(ends.producer, "empty") == 1)
    ends.stage.endpoints["c:0"].close(linger=0.0)
    thread.join(10)
    assert isinstance(outcome[0], WorkerDiedError)
    with pytest.raises(WorkerDiedError):
        blocked.wait()
    with pytest.raises(WorkerDiedError):
        ends.producer.put("late")


def test_a_lost_connection_is_replaced(make_ends: Callable[..., Ends], kind: str) -> None:
    if kind == "local":
        pytest.skip("there is none")
    ends = make_ends()
    ends.producer.put("before")
    again = ends.stage.client("p:0", tcp=kind == "of another host")
    again.put("after")
    assert [ends.consumer.get() for _ in range(2)] == ["before", "after"]


def test_views_that_are_dropped_give_their_memory_back(make_ends: Callable[..., Ends], kind: str) -> None:
    if kind == "local":
        pytest.skip("items are handed over as they are")
    ends = make_ends()
    for _ in range(30):
        ends.producer.put(np.ones(2 << 20, np.uint8))
        assert int(ends.consumer.get()[-1]) == 1
    gc.collect()
    for name in ("p:0", "k:0", "c:0"):
        until(lambda name=name: ends.stage.endpoints[name].shared_memory().used == 0, name)
    ends.stage.broker.run_maintenance()
    assert ends.stage.gate.held == 0
