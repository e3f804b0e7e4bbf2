"""Handles of asynchronous operations that are let go of."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.errors import ChannelClosed, CommunicationTimeoutError
from tests.unit.channel.conftest import Stage, check_nothing_is_left, greeted
from tests.waiting import until

# Nothing was said for so long as this takes.
_SEEN_TO = "channel `c`, key `seen to`"


def waiting(channel: Channel) -> int:
    return sum(figures.waiting_gets for figures in channel.statistics().values())


def wait_until_all_is_seen_to(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    """Failures are told in the order of the drops: this is the last one."""
    channel.close()
    channel.put("not accepted", key="seen to", async_op=True)
    until(lambda: _SEEN_TO in caplog.text)


def test_a_get_whose_handle_is_let_go_of_takes_no_item(channel: Channel) -> None:
    handle = channel.get(async_op=True)
    with pytest.raises(CommunicationTimeoutError):
        handle.wait(timeout=0)
    gc.collect()
    del handle
    channel.put("kept")
    assert channel.get(timeout=10) == "kept"
    assert channel.statistics()["default"].gets == 1
    channel.get_batch(7, async_op=True)
    until(lambda: not waiting(channel))


def test_batch_reservation_returns_when_its_handle_is_dropped(channel: Channel) -> None:
    handle = channel.get_batch(5, async_op=True)
    for item in ("first", "second"):
        channel.put(item, weight=1)
    assert channel.qsize() == 0
    behind = channel.get(async_op=True)
    del handle
    assert behind.wait(10) == "first"
    assert channel.get(timeout=10) == "second"


def test_no_item_vanishes_while_handles_are_let_go_of(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    got: list[int] = []

    def take() -> None:
        while True:
            # What has come for this one by now is told to be lost; what comes later goes to another one.
            channel.get(async_op=True)
            try:
                got.append(channel.get(async_op=True).wait())
            except ChannelClosed:
                return

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        channel.put(number)
    channel.close()
    for thread in threads:
        thread.join(30)
    assert len(got) == len(set(got))
    until(lambda: len(got) + caplog.text.count("an item is lost") == 300)
    assert not waiting(channel)


def test_named_function_is_called_without_a_held_handle(channel: Channel) -> None:
    after = channel.get(async_op=True).then(lambda item: item + 1)
    heard = threading.Event()
    channel.get(async_op=True).add_done_callback(heard.set)
    gc.collect()
    channel.put(1)
    channel.put(2)
    assert after.wait(10) == 2
    assert heard.wait(10)


def test_a_task_that_waits_holds_its_get(channel: Channel) -> None:
    async def run() -> Any:
        task = asyncio.create_task(channel.get(async_op=True).async_wait())
        await asyncio.sleep(0)
        gc.collect()
        channel.put("there")
        return await task

    assert asyncio.run(run()) == "there"


def test_arrived_item_is_reported_lost_when_its_handle_drops(
    channel: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    handle = channel.get(key="k", async_op=True)
    channel.put("lost", key="k")
    until(handle.done)
    read = channel.get(async_op=True)
    channel.put("read")
    assert read.wait(10) == "read"
    del read
    assert "lost" not in caplog.text
    del handle
    until(lambda: "an item is lost" in caplog.text)
    assert "channel `c`, key `k`" in caplog.text
    assert caplog.text.count("an item is lost") == 1


def test_a_put_whose_handle_is_let_go_of_happens(channel: Channel) -> None:
    for number in range(10):
        channel.put(number, async_op=True)
    assert [channel.get(timeout=10) for _ in range(10)] == list(range(10))


def test_a_failed_put_that_nobody_waited_for_is_told(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    channel.close()
    for _ in range(3):
        channel.put("lost", key="k", async_op=True)
    wait_until_all_is_seen_to(channel, caplog)
    messages = [record for record in caplog.records if "key `k`" in record.message]
    assert sum(record.args[2] for record in messages) == 3  # type: ignore[index, misc]
    assert all(record.levelname == "ERROR" for record in messages)
    assert "channel `c`, key `k` is closed, the item was not accepted" in caplog.text


def test_a_failure_that_was_heard_of_is_not_told_again(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    channel.close()
    handle = channel.put("waited for", async_op=True)
    with pytest.raises(ChannelClosed):
        handle.wait(10)
    asked = channel.put("asked", async_op=True)
    until(asked.done)
    assert isinstance(asked.exception(), ChannelClosed)
    with pytest.raises(ChannelClosed):
        channel.put("not asynchronous")
    with pytest.raises(ChannelClosed):
        channel.put_nowait("not asynchronous")
    del handle, asked
    gc.collect()
    wait_until_all_is_seen_to(channel, caplog)
    assert all(_SEEN_TO in record.message for record in caplog.records if "puts failed" in record.message)


def test_nothing_is_left_of_what_was_let_go_of(stage: Stage) -> None:
    consumer = greeted(stage, "k:0")
    for number in range(20):
        consumer.get(key=f"k{number % 3}", async_op=True)
        consumer.get_batch(5, key=f"k{number % 3}", async_op=True)
    check_nothing_is_left(consumer)
    assert not stage.endpoints["k:0"].waits.operations.publication().operations


def test_what_nobody_waits_for_ends_at_its_deadline(channel: Channel) -> None:
    # Connected first: a busy machine may take longer for that than the deadline is away.
    assert channel.qsize() == 0
    late, batch = channel.get(async_op=True, timeout=0.05), channel.get_batch(9, key="k", async_op=True, timeout=0.05)
    channel.put("reserved", weight=1, key="k")
    until(lambda: late.done() and batch.done())
    channel.put("kept")
    assert channel.get(timeout=10) == "kept"
    assert channel.get(key="k", timeout=10) == "reserved"
    for handle in (late, batch):
        with pytest.raises(CommunicationTimeoutError):
            handle.wait()
