"""Channels between processes: how they are created and found, and what crosses."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy
import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import ChannelError, ClusterError, DeadlockError, InvalidNameError, PeerNotFoundError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup
from tests.integration.channel.conftest import waiting
from tests.waiting import until


def echo(worker: Any, name: str) -> Any:
    channel = worker.connect_channel(name)
    channel.put(channel.get(key="there"), key="back")
    return channel.name


def create(worker: Any, name: str, **options: Any) -> int:
    channel = worker.create_channel(name, maxsize=2, **options)
    channel.put("ready")
    return channel.maxsize


def test_who_connects_waits_for_a_channel_that_is_created_later(players: Any, end_channel: Any) -> None:
    answer = players(0, echo, "later")
    channel = Channel.create("later")
    channel.put("hello", key="there")
    assert channel.get(key="back") == "hello"
    assert answer.wait() == ["later"]
    end_channel("later")


@pytest.mark.parametrize("options", [{}, {"node_id": 0}, {"group_rank_affinity": 1}])
def test_a_worker_creates_channels(players: Any, end_channel: Any, options: dict[str, Any]) -> None:
    name = f"of_a_worker_{'_'.join(options)}"
    assert players.call(0, lambda worker: create(worker, name, **options)) == 2
    channel = Channel.connect(name)
    assert (channel.get(), channel.maxsize) == ("ready", 2)
    end_channel(name)


def test_an_affinity_names_a_group(players: Any, end_channel: Any) -> None:
    group = players.group.worker_group_name
    assert players.call(0, lambda worker: create(worker, "beside", group_affinity=group)) == 2
    end_channel("beside")


def test_a_node_and_an_affinity_exclude_each_other(players: Any) -> None:
    with pytest.raises(WorkerGroupError, match="give `node_id` or an affinity, not both"):
        players.call(0, lambda worker: create(worker, "torn", node_id=0, group_rank_affinity=0))


def test_a_name_is_taken_once(players: Any, channel: Channel) -> None:
    with pytest.raises(InvalidNameError, match=f"a channel named `{channel.name}` already exists"):
        Channel.create(channel.name)
    with pytest.raises(InvalidNameError, match=r"a group named `players.*` is running"):
        Channel.create(players.group.worker_group_name)
    with pytest.raises(InvalidNameError, match="'a:b' is not a valid name of a channel"):
        Channel.create("a:b")


def test_a_node_that_is_not_there_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="there is no node 7"):
        Channel.create("nowhere", node_rank=7)
    # The name is still free.
    with pytest.raises(ClusterError, match="there is no node 7"):
        Channel.create("nowhere", node_rank=7)


@pytest.mark.parametrize("rank", ["0", 0.0, None, True])
def test_wrong_rank_of_a_node_is_refused_and_frees_its_name(cluster: Cluster, rank: Any) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"is not the rank of a node: ranks are integers >= 0"):
            Channel.create("of_no_rank", node_rank=rank)


def test_a_name_is_free_again_when_its_channel_could_not_be_made(
    cluster: Cluster, end_channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rlinf_core.channel.launch._launch", lambda *_: interrupt())
        with pytest.raises(KeyboardInterrupt):
            Channel.create("interrupted")
    channel = Channel.create("interrupted", node_rank=numpy.int64(0))  # pyright: ignore[reportArgumentType]
    channel.put("there")
    assert channel.get() == "there"
    end_channel("interrupted")


def test_a_worker_group_is_no_channel(players: Any) -> None:
    name = players.group.worker_group_name
    said = f"`{name}` is a worker group, not a channel"
    with pytest.raises(ChannelError, match=said):
        Channel.connect(name)
    with pytest.raises(WorkerGroupError, match=said):
        players.call(1, lambda worker: worker.connect_channel(name))
    with pytest.raises(ChannelError, match=said):
        Channel(name).put(1)


def test_a_channel_is_no_worker_group(channel: Channel) -> None:
    with pytest.raises(InvalidNameError, match=f"`{channel.name}` is a channel, not a worker group"):
        WorkerGroup.from_group_name(Worker, channel.name)


def test_a_name_that_nobody_creates_is_told_with_near_ones(channel: Channel) -> None:
    wrong = channel.name.replace("channel", "chanel")
    with pytest.raises(PeerNotFoundError, match=f"no channel is named `{wrong}`") as info:
        Channel.connect(wrong, timeout=0.3)
    assert channel.name in str(info.value)
    assert "group" not in str(info.value)


def test_a_channel_travels_as_an_argument(players: Any, channel: Channel) -> None:
    def nested(worker: Any, packed: dict[str, list[Channel]]) -> None:
        packed["channels"][0].put(os.getpid())

    players.call(0, nested, {"channels": [channel]})
    assert channel.get() != os.getpid()


def swap(worker: Any, mine: Channel, others: Channel) -> Any:
    others.put("known as a producer")
    mine.get()
    got = mine.get()
    others.put("never")
    return got


def test_mutual_waits_for_items_are_reported_as_deadlock(players: Any, end_channel: Any) -> None:
    one, two = Channel.create("knot_one"), Channel.create("knot_two")
    first, second = players(0, swap, one, two), players(1, swap, two, one)
    for handle in (first, second):
        with pytest.raises(WorkerGroupError) as info:
            # Without a time: who sets himself one is not stuck.
            handle.wait()
        assert isinstance(info.value.exceptions[0], DeadlockError)
        assert "its only producer" in str(info.value)
    end_channel("knot_one")
    end_channel("knot_two")


def get_some(worker: Any, channel: Channel, count: int, key: str = "default") -> list[Any]:
    return [channel.get(key=key) for _ in range(count)]


def test_asynchronous_iteration_leaves_the_loop_free(channel: Channel) -> None:
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


def test_a_local_channel_copies_nothing() -> None:
    channel, item = Channel.create("local", local=True), object()
    channel.put(item)
    assert channel.peek_all() == [item]
    assert channel.get() is item


def test_a_local_channel_cannot_leave_its_process(players: Any) -> None:
    with pytest.raises(ChannelError, match="cannot leave its process"):
        players(0, get_some, Channel.create("local", local=True), 1)
