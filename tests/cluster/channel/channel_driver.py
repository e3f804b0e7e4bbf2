"""The driver of `test_channel_netns.py`: it runs on one of the hosts, and does what the test asks for on its input."""

from __future__ import annotations

import os
import time
from typing import Any

from rlinf_core import Channel, Cluster, NodePlacementStrategy, Worker, WorkerGroup, WorkerGroupHandle
from tests.cluster.steps import serve


class Actor(Worker):
    def pid(self) -> int:
        return os.getpid()

    def put(self, channel: Channel, sizes: list[int]) -> None:
        import torch

        for number, size in enumerate(sizes):
            channel.put({"number": number, "tensor": torch.full((size,), float(number))}, weight=1)

    def get(self, channel: Channel, count: int) -> list[list[float]]:
        """Return the number, the length and the mean of each item."""
        result: list[list[float]] = []
        for _ in range(count):
            item = channel.get()
            tensor = item["tensor"]
            result.append([item["number"], len(tensor), float(tensor.double().mean()) if len(tensor) else 0.0])
        return result

    def get_of_each(self, channel: Channel, keys: list[str]) -> list[int]:
        """Return the length of one item of each key, all asked for at once."""
        works = [channel.get(key, async_op=True) for key in keys]
        return [len(work.wait()) for work in works]


cluster: Cluster
actors: WorkerGroup[Actor]
channels: dict[int, Channel]
calls: dict[int, WorkerGroupHandle[Any]] = {}


def begin() -> list[int]:
    """Launch an actor and a channel on each host; the pids of the actors."""
    global cluster, actors, channels
    cluster = Cluster(num_nodes=2)
    actors = Actor.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="actors")
    channels = {rank: Channel.create(f"on_{rank}", maxsize=3, node_rank=rank) for rank in range(2)}
    return actors.pid().wait()


def pass_on(producer: int, consumer: int, node: int, sizes: list[int]) -> Any:
    """Return what the consumer found of tensors of these sizes that went through the channel on a node."""
    getting = actors.execute_on(consumer).get(channels[node], len(sizes))
    actors.execute_on(producer).put(channels[node], sizes).wait(timeout=90)
    return getting.wait(timeout=90)[0]


def ask(rank: int, keys: list[str], waiting: int) -> None:
    """Let a worker get one item of each key of the channel on host 0, and return when so many gets wait for each."""
    calls[rank] = actors.execute_on(rank).get_of_each(channels[0], keys)
    deadline = time.monotonic() + 60
    while True:
        figures = channels[0].statistics()
        if all(key in figures and figures[key].waiting_gets == waiting for key in keys):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(str(figures))
        time.sleep(0.01)


def hand_out(sizes: dict[str, int]) -> list[int]:
    """Put an item of a size under each key; how many of each key nobody was given."""
    for key, size in sizes.items():
        channels[0].put(bytes(size), key=key, timeout=60)
    return [channels[0].qsize(key) for key in sizes]


def answer(rank: int) -> list[int]:
    return calls[rank].wait(timeout=60)[0]


if __name__ == "__main__":
    serve(globals())
