"""What a channel promises, between real processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.channel.operation import ChannelEmpty, ChannelFull
from rlinf_core.errors import ChannelClosed, ChannelError, CommunicationTimeoutError, PayloadError
from rlinf_core.failures import WorkerGroupError

Until = Callable[[Callable[[], object]], None]


def put_all(worker: Any, channel: Channel, items: list[Any], key: str = "default", weight: float = 1) -> None:
    for item in items:
        channel.put(item, weight=weight, key=key)


def get_some(worker: Any, channel: Channel, count: int, key: str = "default") -> list[Any]:
    return [channel.get(key=key) for _ in range(count)]


def get_batch(worker: Any, channel: Channel, weight: float, key: str = "default") -> list[Any]:
    return channel.get_batch(weight, key=key)


def waiting(channel: Channel, count: int, key: str = "default", *, puts: bool = False) -> Callable[[], bool]:
    def check() -> bool:
        figures = channel.statistics().get(key)
        return figures is not None and (figures.waiting_puts if puts else figures.waiting_gets) == count

    return check


def test_items_of_a_key_come_in_order_and_keys_are_apart(players: Any, channel: Channel) -> None:
    first = players(0, put_all, channel, [("a", i) for i in range(50)], "a")
    second = players(1, put_all, channel, [("b", i) for i in range(50)], "b")
    assert players.call(2, get_some, channel, 50, "b") == [("b", i) for i in range(50)]
    assert players.call(2, get_some, channel, 50, "a") == [("a", i) for i in range(50)]
    first.wait()
    second.wait()


def test_waiters_are_served_first_come(players: Any, channel: Channel, until: Until) -> None:
    early = players(0, get_some, channel, 1)
    until(waiting(channel, 1))
    late = players(1, get_some, channel, 1)
    until(waiting(channel, 2))
    put_all(None, channel, ["first", "second"])
    assert (early.wait(), late.wait()) == ([["first"]], [["second"]])


def test_a_full_key_holds_its_producer_back_and_nobody_else(players: Any, bounded: Channel, until: Until) -> None:
    held = players(0, put_all, bounded, list(range(6)))
    until(waiting(bounded, 1, puts=True))
    assert (bounded.full(), bounded.qsize(), bounded.maxsize) == (True, 4, 4)
    with pytest.raises(ChannelFull):
        bounded.put_nowait("no room")
    bounded.put_nowait("elsewhere", key="other")
    assert bounded.get_nowait(key="other") == "elsewhere"
    assert not held.done()
    assert [bounded.get() for _ in range(6)] == list(range(6))
    held.wait()


def test_a_batch_may_weigh_more_than_a_bounded_queue_holds(players: Any, bounded: Channel) -> None:
    batch = players(1, get_batch, bounded, 8)
    players.call(0, put_all, bounded, list(range(8)))
    assert batch.wait() == [list(range(8))]


def test_batches_reach_their_weight_with_weightless_items(channel: Channel) -> None:
    for item, weight in [("a", 2), ("b", 0), ("c", 3), ("d", 1), ("e", 1)]:
        channel.put(item, weight=weight)
    assert channel.get_batch(4) == ["a", "b", "c"]
    assert channel.get_batch(2) == ["d", "e"]


def test_two_consumers_never_interleave_inside_a_batch(players: Any, channel: Channel, until: Until) -> None:
    first = players(0, get_batch, channel, 10)
    until(waiting(channel, 1))
    second = players(1, get_batch, channel, 10)
    until(waiting(channel, 2))
    players.call(2, put_all, channel, list(range(20)))
    assert first.wait() == [list(range(10))]
    assert second.wait() == [list(range(10, 20))]


def test_what_makes_no_sense_is_refused_where_it_is_called(channel: Channel) -> None:
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="batch_weight"):
            channel.get_batch(weight)
    with pytest.raises(ValueError, match="weight"):
        channel.put(1, weight=-1)
    with pytest.raises(ValueError, match="maxsize"):
        Channel.create("negative", maxsize=-1)
    with pytest.raises(TypeError, match="a key is text, a number, None, bytes or a tuple of such, not "):
        channel.put(1, key=object())  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="cannot be pickled"):
        channel.put(threading.Lock())


def test_a_get_that_times_out_says_what_it_found(channel: Channel) -> None:
    with pytest.raises(CommunicationTimeoutError, match="the queue is empty"):
        channel.get(timeout=0.1)
    channel.put("light")
    with pytest.raises(CommunicationTimeoutError, match="of weight 0, which adds nothing") as info:
        channel.get_batch(1, timeout=0.1)
    assert "put the items with a weight" in str(info.value)
    assert channel.get_nowait() == "light"


def test_a_put_that_times_out_was_not_accepted(bounded: Channel) -> None:
    put_all(None, bounded, list(range(4)))
    with pytest.raises(CommunicationTimeoutError, match="full: it holds 4 items of 4"):
        bounded.put("late", timeout=0.1)
    assert [bounded.get() for _ in range(4)] == list(range(4))
    with pytest.raises(ChannelEmpty):
        bounded.get_nowait()


def test_what_a_timed_out_batch_had_reserved_goes_back_in_order(players: Any, channel: Channel, until: Until) -> None:
    put_all(None, channel, ["a", "b"])
    work = channel.get_batch(5, async_op=True, timeout=3)
    until(waiting(channel, 1))
    behind = players(0, get_some, channel, 2)
    until(waiting(channel, 2))
    with pytest.raises(CommunicationTimeoutError, match="2 items of weight 2"):
        work.wait()
    assert behind.wait() == [["a", "b"]]


def test_an_operation_that_nobody_waits_for_ends_at_its_deadline(channel: Channel, until: Until) -> None:
    work = channel.get(async_op=True, timeout=0.1)
    until(waiting(channel, 0))
    channel.put("for whoever comes next")
    until(work.done)
    with pytest.raises(CommunicationTimeoutError):
        work.wait()
    assert channel.get_nowait() == "for whoever comes next"


def test_a_closed_channel_is_drained_and_takes_no_more(players: Any, bounded: Channel, until: Until) -> None:
    blocked = players(0, put_all, bounded, list(range(5)))
    until(waiting(bounded, 1, puts=True))
    bounded.close()
    bounded.close()
    with pytest.raises(WorkerGroupError) as info:
        blocked.wait()
    assert isinstance(info.value.exceptions[0], ChannelClosed)
    with pytest.raises(ChannelClosed, match="was not accepted"):
        bounded.put("late")
    assert bounded.get_batch(3) == [0, 1, 2]
    assert bounded.get_batch(3) == [3]
    with pytest.raises(ChannelClosed, match="nothing is left"):
        bounded.get_batch(1)
    with pytest.raises(ChannelClosed):
        bounded.get_nowait()


def test_who_waits_when_it_closes_gets_what_is_there(players: Any, channel: Channel, until: Until) -> None:
    channel.put("rest", weight=1)
    batch = players(0, get_batch, channel, 5)
    until(waiting(channel, 1))
    single = players(1, get_some, channel, 1)
    until(waiting(channel, 2))
    channel.close()
    assert batch.wait() == [["rest"]]
    with pytest.raises(WorkerGroupError) as info:
        single.wait()
    assert isinstance(info.value.exceptions[0], ChannelClosed)


def test_iterating_ends_when_the_channel_is_closed(players: Any, channel: Channel) -> None:
    consumer = players(0, lambda _, one: list(one), channel)
    put_all(None, channel, list(range(5)))
    channel.close()
    assert consumer.wait() == [list(range(5))]


def test_asynchronous_iteration_leaves_the_loop_free(channel: Channel, until: Until) -> None:
    async def produce() -> None:
        for index in range(5):
            # The consumer waits already, and yet this task of its loop goes on.
            await asyncio.to_thread(until, waiting(channel, 1))
            channel.put(index)
        await asyncio.to_thread(until, waiting(channel, 1))
        channel.close()

    async def consume() -> list[Any]:
        producer = asyncio.create_task(produce())
        got = [item async for item in channel]
        await producer
        return got

    assert asyncio.run(consume()) == list(range(5))


def test_asynchronous_puts_keep_the_order_of_a_process(channel: Channel) -> None:
    works = [channel.put(index, async_op=True) for index in range(300)]
    channel.put(300)
    works += [channel.put(index, async_op=True) for index in range(301, 600)]
    channel.put_nowait(600)
    for work in works:
        work.wait()
    assert [channel.get() for _ in range(601)] == list(range(601))


def test_asynchronous_gets_are_served_in_their_order(channel: Channel) -> None:
    works = [channel.get(async_op=True) for _ in range(10)]
    put_all(None, channel, list(range(10)))
    assert [work.wait() for work in works] == list(range(10))


def test_asynchronous_puts_beyond_the_bound_do_not_block(bounded: Channel) -> None:
    works = [bounded.put(index, async_op=True) for index in range(3000)]
    assert not works[-1].done()
    assert [bounded.get() for _ in range(3000)] == list(range(3000))
    works[-1].wait()


def test_a_given_up_put_is_never_accepted(bounded: Channel) -> None:
    put_all(None, bounded, list(range(4)))
    works = [bounded.put(("late", index), async_op=True, timeout=0.1) for index in range(3)]
    for work in works:
        with pytest.raises(CommunicationTimeoutError):
            work.wait()
    assert [bounded.get() for _ in range(4)] == list(range(4))
    assert bounded.empty()


def test_a_cancelled_task_takes_no_item_with_it(channel: Channel, until: Until) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(channel.get(async_op=True).async_wait())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    until(waiting(channel, 0))
    channel.put("still there")
    assert channel.get_nowait() == "still there"


def test_looking_takes_nothing(channel: Channel) -> None:
    assert channel.empty()
    put_all(None, channel, [{"n": 1}, {"n": 2}])
    assert channel.peek_all() == [{"n": 1}, {"n": 2}]
    assert (channel.qsize(), channel.empty(), channel.full()) == (2, False, False)
    assert channel.get() == {"n": 1}
    assert channel.peek_all("another") == []


def test_statistics_tell_what_went_through_each_key(players: Any, channel: Channel, until: Until) -> None:
    consumer = players(0, get_some, channel, 2, "k")
    until(waiting(channel, 1, "k"))
    put_all(None, channel, [b"x" * 1000] * 3, key="k")
    consumer.wait()
    figures = channel.statistics()["k"]
    assert (figures.puts, figures.gets, figures.depth) == (3, 2, 1)
    assert 3000 < figures.bytes < 4000
    assert figures.get_wait > 0


def test_local_channel_obeys_the_same_rules_without_copies() -> None:
    channel = Channel.create("local", maxsize=1, local=True)
    item = object()
    channel.put(item)
    assert channel.peek_all() == [item]
    with pytest.raises(ChannelFull):
        channel.put_nowait(1)
    with pytest.raises(CommunicationTimeoutError):
        channel.put(1, timeout=0.05)
    later = channel.put("second", async_op=True)
    assert channel.get() is item
    later.wait()
    channel.close()
    assert list(channel) == ["second"]


def test_a_local_channel_cannot_leave_its_process(players: Any) -> None:
    with pytest.raises(ChannelError, match="cannot leave its process"):
        players(0, get_some, Channel.create("local", local=True), 1)
