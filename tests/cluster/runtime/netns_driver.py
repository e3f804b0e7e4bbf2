"""The driver of `test_runtime_netns.py`: it runs on one of the hosts, and does what the test asks for on its input."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rlinf_core import Cluster, NodePlacementStrategy, Worker, WorkerDiedError, WorkerGroup, WorkerGroupError
from tests.cluster.steps import serve


class Peer(Worker):
    def place(self) -> tuple[str, int, str]:
        return socket.gethostname(), os.getpid(), sys.executable

    def exchange(self, peer: int, sizes: list[int]) -> list[float]:
        """Send tensors to a peer and receive as many from it."""
        import torch

        sums: list[float] = []
        for size in sizes:
            self.send({"size": size, "tensor": torch.full((size,), 0.5)}, "peer", peer)
            got = self.recv("peer", peer)
            assert got["size"] == size
            sums.append(float(got["tensor"].sum()))
        return sums

    def rally(self, peer: int, leads: bool, folder: str) -> tuple[int, float]:
        """Pass messages to and fro with a peer until the file `stop` is there; return how often, and the longest turn
        in seconds."""
        turns, longest, extra = 0, 0.0, True
        while extra:
            began = time.monotonic()
            if leads:
                extra = not Path(folder, "stop").exists()
                self.send(extra, "peer", peer)
                self.recv("peer", peer)
            else:
                extra = self.recv("peer", peer)
                self.send(extra, "peer", peer)
            turns, longest = turns + 1, max(longest, time.monotonic() - began)
            Path(folder, "begun").touch()
        return turns, longest

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def take(self, rank: int) -> Any:
        return self.recv("peer", rank)

    def compute(self) -> None:
        """Go on until the end. If it waited, too, the two would be a deadlock, and be told so before one dies."""
        time.sleep(600)


cluster: Cluster
group: WorkerGroup[Peer]


def join(num_nodes: int) -> list[list[Any]]:
    """Return the rank, address and name of each node."""
    global cluster
    cluster = Cluster(num_nodes=num_nodes)
    return [[node.rank, node.ip, node.hostname] for node in cluster.topology.nodes]


def launch(nodes: list[int]) -> list[Any]:
    """Return the host's name, pid and interpreter of each worker."""
    global group
    group = Peer.create_group().launch(cluster, NodePlacementStrategy(nodes), name="peer")
    return group.place().wait()


def exchange(one: int, other: int, sizes: list[int]) -> list[Any]:
    return group.execute_on(one, other).exchange.scatter([other, one], [sizes, sizes]).wait(timeout=100)


def rally(one: int, other: int, folder: str) -> list[Any]:
    """Return how often each of two workers had a message of the other and the longest turn, or what each failed of."""
    handle = group.execute_on(one, other).rally.scatter([other, one], [True, False], [folder, folder])
    try:
        return handle.wait(timeout=100)
    except WorkerGroupError as caught:
        return [f"{type(error).__name__}: {error}" for error in caught.exceptions]


def say(rank: int, text: str) -> None:
    group.execute_on(rank).say(text).wait()


def death(waiter: int, mortal: int) -> list[dict[str, Any]]:
    """Return what a worker is told that waits for another one that dies, and what the driver is that has called
    that one.
    """
    output: list[dict[str, Any]] = []
    waiting, dying = group.execute_on(waiter).take(mortal), group.execute_on(mortal).compute()
    for handle in (waiting, dying):
        try:
            handle.wait(timeout=100)
        except WorkerGroupError as caught:
            (error,) = caught.exceptions
            if not isinstance(error, WorkerDiedError):
                raise
            output.append({"address": error.address, "node": error.node, "cause": error.cause, "where": error.where})
    return output


if __name__ == "__main__":
    serve(globals())
