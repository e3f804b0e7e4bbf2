"""Measures channels against `ray.util.queue.Queue` and against memcpy, all in one run on one local Ray.

    python benchmarks/runtime/bench_channel.py [--quick] [--rounds N] [--only PART] [--against COMMIT]

The same two workers put and get through both, in turn. Each line is a ratio of speeds: the median of several rounds,
with its spread (the quarters). Absolute numbers depend on the machine and on what else runs there; ratios of one run
less so. A put is acknowledged before the next one begins, unless the line says otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.queue import Queue

from benchmarks import against
from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup

MB = 1 << 20
BATCH = 32
# When a worker began and ended, on the clock that all processes of a host share.
Span = tuple[float, float]


def _item(size: int) -> object:
    return torch.ones(size, dtype=torch.uint8) if size else (1, "a small item")


class Bench(Worker):
    """Puts and gets, and tells when it began and ended."""

    def warm(self, size: int) -> None:
        torch.set_num_threads(1)
        self.item = _item(size)
        self.target = torch.empty(size, dtype=torch.uint8)

    def put(self, channel: Channel, count: int) -> Span:
        begun = time.monotonic()
        for _ in range(count):
            channel.put(self.item, weight=1)
        return begun, time.monotonic()

    def put_async(self, channel: Channel, count: int) -> Span:
        begun = time.monotonic()
        for work in [channel.put(self.item, weight=1, async_op=True) for _ in range(count)]:
            work.wait()
        return begun, time.monotonic()

    def get(self, channel: Channel, count: int) -> Span:
        begun = time.monotonic()
        for _ in range(count):
            channel.get()
        return begun, time.monotonic()

    def get_and_copy(self, channel: Channel, count: int) -> Span:
        begun = time.monotonic()
        for _ in range(count):
            self.target.copy_(channel.get())
        return begun, time.monotonic()

    def get_batches(self, channel: Channel, count: int) -> Span:
        begun = time.monotonic()
        for _ in range(count // BATCH):
            channel.get_batch(BATCH)
        return begun, time.monotonic()

    def queue_put(self, queue: Any, count: int) -> Span:
        begun = time.monotonic()
        for _ in range(count):
            queue.put(self.item)
        return begun, time.monotonic()

    def queue_get(self, queue: Any, count: int) -> Span:
        begun = time.monotonic()
        for _ in range(count):
            queue.get()
        return begun, time.monotonic()

    def copy(self, count: int) -> Span:
        begun = time.monotonic()
        for _ in range(count):
            self.target.copy_(self.item)
        return begun, time.monotonic()


@dataclass(frozen=True)
class Line:
    """One line of the table: `ours` and `base` run `count` items each, and give seconds for one item."""

    what: str
    size: int
    goal: float
    ours: Callable[[Stage], float]
    base: Callable[[Stage], float]
    against: str


class Stage:
    """The two workers, and what lies between them."""

    def __init__(self, cluster: Cluster, quick: bool) -> None:
        self.scale = 5 if quick else 1
        self.group: WorkerGroup[Bench] = Bench.create_group().launch(
            cluster, NodePlacementStrategy([0, 0]), name="bench"
        )
        self.channel = Channel.create("bench_channel")
        self.queue = Queue(actor_options={"num_cpus": 0})

    def both(self, put: str, get: str, through: object, count: int) -> float:
        """Return seconds for one item, from the first put or get to the last."""
        count = max(BATCH, count // self.scale // BATCH * BATCH)
        getting = getattr(self.group.execute_on(1), get)(through, count)
        putting = getattr(self.group.execute_on(0), put)(through, count)
        spans = [*putting.wait(), *getting.wait()]
        return (max(end for _, end in spans) - min(begin for begin, _ in spans)) / count

    def ours(self, put: str, get: str, count: int) -> float:
        return self.both(put, get, self.channel, count)

    def theirs(self, count: int) -> float:
        return self.both("queue_put", "queue_get", self.queue, count)

    def two_copies(self, count: int) -> float:
        ((begin, end),) = self.group.execute_on(0).copy(count).wait()
        return 2 * (end - begin) / count


QUEUE = "ray.util.queue"
LINES = [
    Line("small", 0, 20, lambda s: s.ours("put", "get", 20_000), lambda s: s.theirs(1000), QUEUE),
    Line("1 MB tensors", MB, 15, lambda s: s.ours("put", "get", 3000), lambda s: s.theirs(300), QUEUE),
    Line(
        "64 MB tensors, copied out",
        64 * MB,
        0.5,
        lambda s: s.ours("put", "get_and_copy", 64),
        lambda s: s.two_copies(20),
        "two memcpys",
    ),
    Line(
        f"get_batch of {BATCH} small",
        0,
        25,
        lambda s: s.ours("put", "get_batches", 20_000),
        lambda s: s.theirs(1000),
        QUEUE,
    ),
    Line(
        f"get_batch of {BATCH} small, async put",
        0,
        60,
        lambda s: s.ours("put_async", "get_batches", 40_000),
        lambda s: s.theirs(1000),
        QUEUE,
    ),
]


def measure(stage: Stage, line: Line, rounds: int) -> bool:
    """Print one line, and tell whether it keeps its promise."""
    stage.group.warm(line.size).wait()
    line.ours(stage)
    line.base(stage)
    ours, base = [], []
    for _ in range(rounds):
        base.append(line.base(stage))
        ours.append(line.ours(stage))
    ratios = [theirs / own for theirs, own in zip(base, ours, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    ratio = statistics.median(ratios)
    kept = ratio >= line.goal
    own = statistics.median(ours)
    print(
        f"{line.what:38}{1 / own:>9.0f}/s{1 / statistics.median(base):>9.0f}/s {line.against:15}"
        f"{ratio:>7.2f}x  ({low:.2f}-{high:.2f})  goal {line.goal:g}x{'' if kept else '  MISSED'}",
        flush=True,
    )
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer items")
    parser.add_argument("--rounds", type=int, default=7, help="of each line (default 7)")
    parser.add_argument("--only", default="", help="only lines with this in their name")
    options = parser.parse_args()
    rounds = max(2, options.rounds)
    with Cluster(num_nodes=1) as cluster:
        stage = Stage(cluster, options.quick)
        print(f"{rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ray {ray.__version__}")
        kept = [measure(stage, line, rounds) for line in LINES if options.only in line.what]
        stage.group.shutdown()
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(against.main(main, __file__, ("--quick", "--rounds", "2")))
