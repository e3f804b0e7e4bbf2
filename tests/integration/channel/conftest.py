"""Workers that run what a test tells them to."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.process.proc import peer_credentials
from rlinf_core.worker.handle import WorkerGroupHandle
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup

_names = itertools.count()


class Puppet(Worker):
    """Runs functions of a test: `function(worker, *args)`."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)


class Troupe:
    """Puppets of a group. `troupe(rank, function, *args)` gives a handle of one result."""

    def __init__(self, group: WorkerGroup[Puppet], ranks: Sequence[int]) -> None:
        self.group, self.ranks = group, ranks
        self.killed: set[int] = set()

    def __call__(self, rank: int, function: Callable[..., Any], *args: Any) -> WorkerGroupHandle[Any]:
        return self.group.execute_on(self.ranks[rank]).run(function, *args)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self(rank, function, *args).wait(30)[0]

    def name(self, rank: int) -> str:
        return str(self.group.addresses[self.ranks[rank]])

    def kill(self, rank: int) -> None:
        self.killed.add(self.ranks[rank])
        os.kill(self.call(rank, pid), signal.SIGKILL)


@pytest.fixture
def troupe(cluster: Cluster) -> Iterator[Callable[[int], Troupe]]:
    """Launches groups of so many puppets, for this test alone: they may be killed."""
    made: list[WorkerGroup[Puppet]] = []

    def launch(size: int) -> Troupe:
        group = Puppet.create_group().launch(cluster, NodePlacementStrategy([0] * size), name=f"puppets{next(_names)}")
        made.append(group)
        return Troupe(group, range(size))

    yield launch
    for group in made:
        # Calls on those that a test killed have failed, of course.
        with suppress(WorkerGroupError):
            group.shutdown()


@pytest.fixture(scope="module")
def players(cluster: Cluster) -> Iterator[Troupe]:
    """Three puppets that all tests of a module share."""
    with Puppet.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name=f"players{next(_names)}") as group:
        yield Troupe(group, range(3))


@pytest.fixture(scope="module")
def stage(cluster: Cluster) -> Iterator[tuple[WorkerGroup[Puppet], list[int]]]:
    """A group, and its ranks that a test may have: those of tests before that were not killed."""
    group = Puppet.create_group().launch(cluster, NodePlacementStrategy([0] * 12), name=f"stage{next(_names)}")
    yield group, list(range(12))
    with suppress(WorkerGroupError):
        group.shutdown()


@pytest.fixture
def borrow(stage: tuple[WorkerGroup[Puppet], list[int]]) -> Iterator[Callable[[int], Troupe]]:
    """Takes so many puppets of a group that tests share, and gives back those that `kill` has left."""
    group, free = stage
    taken: list[Troupe] = []

    def take(size: int) -> Troupe:
        ranks = [free.pop(0) for _ in range(size)]
        taken.append(Troupe(group, ranks))
        return taken[-1]

    yield take
    for troupe in taken:
        free.extend(set(troupe.ranks) - troupe.killed)


def end(cluster: Cluster, name: str) -> None:
    """End a channel's process: those of hundreds of tests would not fit."""
    ray = ray_api()
    # One that was closed may have ended by itself.
    with suppress(ValueError):
        ray.kill(ray.get_actor(f"{name}:0", namespace=cluster.session.job))


@pytest.fixture
def channel(cluster: Cluster) -> Iterator[Channel]:
    """A new channel without a bound."""
    made = Channel.create(f"channel{next(_names)}")
    yield made
    end(cluster, made.name)


@pytest.fixture
def end_channel(cluster: Cluster) -> Callable[[str], None]:
    """Ends the process of a channel that a test created itself."""
    return lambda name: end(cluster, name)


def pid(worker: Any) -> int:
    return os.getpid()


def process_of(channel: Channel) -> int:
    """Return the process of a channel."""
    backend: Any = channel._backend
    backend.connect()
    return peer_credentials(backend.stream.connection.sock)[0]


def waiting(channel: Channel, count: int, key: str = "default", *, puts: bool = False) -> Callable[[], bool]:
    """Return a condition: so many operations wait."""

    def check() -> bool:
        figures = channel.statistics().get(key)
        return figures is not None and (figures.waiting_puts if puts else figures.waiting_gets) == count

    return check
