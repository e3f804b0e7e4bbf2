"""What remains of a channel's promises when processes are killed, and when it is closed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.channel.broker_clients import LostItem
from rlinf_core.channel.channel import Channel
from rlinf_core.errors import CancelledOperationError, ChannelClosed, InvalidNameError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.process.proc import stat
from tests.integration.channel.conftest import pid, process_of, waiting
from tests.waiting import until

LARGE = 5 << 20


def put_some(worker: Any, channel: Channel, count: int, size: int = 0) -> None:
    for index in range(count):
        channel.put((index, bytearray(size)), weight=1)


def get_one(worker: Any, channel: Channel) -> int:
    return channel.get()[0]


def get_batch(worker: Any, channel: Channel, weight: float) -> list[int]:
    return [item[0] for item in channel.get_batch(weight)]


@pytest.mark.parametrize("size", [10, LARGE])
def test_what_was_accepted_survives_its_producer(borrow: Any, channel: Channel, size: int) -> None:
    actors = borrow(2)
    actors.call(0, put_some, channel, 3, size)
    actors.kill(0)
    assert [actors.call(1, get_one, channel) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("size", [10, LARGE])
def test_item_of_a_dead_consumer_goes_to_the_next(borrow: Any, channel: Channel, size: int) -> None:
    actors = borrow(2)
    victim = actors.call(0, pid)
    actors.killed.add(actors.ranks[0])
    actors(0, get_one, channel)
    until(waiting(channel, 1))
    # The item reaches the process, which cannot take it any more.
    os.kill(victim, signal.SIGSTOP)
    until(lambda: stat(victim).is_stopped)
    put_some(None, channel, 3, size)
    until(lambda: channel.qsize() == 2)
    os.kill(victim, signal.SIGKILL)
    until(lambda: channel.qsize() == 3)
    assert [actors.call(1, get_one, channel) for _ in range(3)] == [0, 1, 2]


def die_while_sending(worker: Any, channel: Channel, size: int) -> None:
    backend = channel._backend
    backend.connect()
    # Right after the announcement, before a byte of the item is on its way.
    backend._send = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    channel.put(bytearray(size), key=("arm", 0))


def test_a_half_sent_item_is_dropped_and_reported(borrow: Any, channel: Channel) -> None:
    actors = borrow(2)
    actors.killed.add(actors.ranks[0])
    actors(0, die_while_sending, channel, LARGE)
    until(channel.losses)
    assert channel.losses() == [LostItem(actors.name(0), ("arm", 0))]
    assert channel.empty(("arm", 0))
    actors.call(1, put_some, channel, 1)
    assert channel.get()[0] == 0


def test_get_fails_when_all_its_producers_are_dead(borrow: Any, channel: Channel) -> None:
    actors = borrow(3)
    actors.call(0, put_some, channel, 1)
    actors.call(1, put_some, channel, 1)
    for _ in range(2):
        channel.get()
    waits = actors(2, get_one, channel)
    until(waiting(channel, 1))
    actors.kill(0)
    time.sleep(0.5)
    assert not waits.done(), "another producer lives"
    actors.kill(1)
    with pytest.raises(WorkerGroupError) as info:
        waits.wait(20)
    (error,) = info.value.exceptions
    assert isinstance(error, WorkerDiedError)
    assert error.address == actors.name(1)
    assert "all that ever put into it are dead" in str(error)


def test_what_is_left_can_be_got_although_all_producers_are_dead(borrow: Any, channel: Channel) -> None:
    actors = borrow(2)
    actors.call(0, put_some, channel, 2)
    actors.kill(0)
    waits = actors(1, get_batch, channel, 3)
    with pytest.raises(WorkerGroupError):
        waits.wait(20)
    assert [actors.call(1, get_one, channel) for _ in range(2)] == [0, 1]


def test_the_driver_as_a_producer_keeps_gets_waiting(borrow: Any, channel: Channel) -> None:
    actors = borrow(2)
    put_some(None, channel, 1)
    actors.call(0, put_some, channel, 1)
    assert [channel.get()[0] for _ in range(2)] == [0, 0]
    waits = actors(1, get_one, channel)
    until(waiting(channel, 1))
    actors.kill(0)
    time.sleep(1)
    assert not waits.done()
    channel.put((7,))
    assert waits.wait(20) == [7]


def test_operations_fail_when_the_channels_own_process_dies(borrow: Any, channel: Channel) -> None:
    actors = borrow(1)
    waits = actors(0, get_one, channel)
    until(waiting(channel, 1))
    os.kill(process_of(channel), signal.SIGKILL)
    with pytest.raises(WorkerGroupError) as info:
        waits.wait(20)
    (error,) = info.value.exceptions
    assert isinstance(error, WorkerDiedError)
    assert error.address == f"{channel.name}:0"
    with pytest.raises(WorkerDiedError):
        channel.put(1)


def create_and_put(worker: Any, name: str) -> int:
    worker.create_channel(name).put("from the grave")
    return worker.worker_info.node_id


def test_a_channel_outlives_the_worker_that_created_it(troupe: Any, end_channel: Any) -> None:
    actors = troupe(2)
    assert actors.call(0, create_and_put, "inherited") == 0
    actors.kill(0)
    actors.group.shutdown()
    channel = Channel.connect("inherited")
    assert channel.get() == "from the grave"
    end_channel("inherited")


def take_all(worker: Any, channel: Channel) -> None:
    while True:
        channel.put(channel.get())


def test_a_call_that_is_given_up_ends_at_its_next_wait(borrow: Any, channel: Channel) -> None:
    actors = borrow(1)
    channel.put("goes round and round")
    call = actors(0, take_all, channel)
    until(lambda: channel.statistics()["default"].gets > 10)
    call.cancel()
    with pytest.raises(WorkerGroupError) as info:
        call.wait(20)
    assert isinstance(info.value.exceptions[0], CancelledOperationError)


def is_gone(process: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{process}").exists()


def get_all(worker: Any, channel: Channel) -> list[Any]:
    return list(channel)


def try_all(worker: Any, channel: Channel) -> list[str]:
    """Return what each operation raises."""
    said: list[str] = []
    for operation in (
        lambda: channel.put(1),
        lambda: channel.put_nowait(1),
        lambda: channel.put(1, async_op=True).wait(),
        lambda: channel.put(bytes(8 << 20)),
        lambda: channel.get(),
        lambda: channel.get_nowait(),
        lambda: channel.get_batch(3),
        lambda: channel.get(async_op=True).wait(),
    ):
        try:
            operation()
        except ChannelClosed as error:
            said.append(error.message.rpartition(", ")[2])
    return said


SAID = ["the item was not accepted"] * 4 + ["and nothing is left in it"] * 4


def test_ended_process_reports_closed_to_later_calls(borrow: Any) -> None:
    channel = Channel.create("ends")
    actors = borrow(2)
    for item in range(3):
        channel.put(item)
    process = process_of(channel)
    channel.close()
    assert actors.call(0, get_all, channel) == [0, 1, 2]
    until(is_gone(process))
    # Those who were connected, and one who comes only now.
    assert try_all(None, channel) == SAID
    assert actors.call(0, try_all, channel) == SAID
    assert actors.call(1, try_all, channel) == SAID
    assert list(channel) == list(Channel.connect(channel.name)) == []
    channel.close()
    assert (channel.qsize(), channel.full(), channel.peek_all(), channel.losses()) == (0, False, [], [])
    figures = channel.statistics()["default"]
    assert (figures.puts, figures.gets) == (3, 3)
    with pytest.raises(InvalidNameError, match=f"a channel named `{channel.name}` existed and is closed"):
        Channel.create(channel.name)
