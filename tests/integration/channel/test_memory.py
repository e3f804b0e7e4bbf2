"""How often a payload lies in memory on its way through a channel."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_core.channel.channel import Channel

MB = 1 << 20
TOTAL = 256 * MB
# What interpreters allocate besides, while they work.
SLACK = 24 * MB


def pid(worker: Any) -> int:
    return os.getpid()


def prepare(worker: Any, size: int) -> None:
    worker.source = np.ones(size, np.uint8)


def put(worker: Any, channel: Channel, count: int) -> None:
    for _ in range(count):
        channel.put(worker.source)


def get(worker: Any, channel: Channel, count: int) -> int:
    total = 0
    for _ in range(count):
        item = channel.get()
        total += int(item[::4096].sum()) * 4096
    return total


def memory(processes: Sequence[int]) -> int:
    """Bytes of all processes, each page that several share counted once."""
    texts = (Path(f"/proc/{one}/smaps_rollup").read_text() for one in processes)
    return sum(int(re.findall(r"Pss:\s+(\d+)", text)[0]) << 10 for text in texts)


class Peak:
    """The most that some processes took together while a block ran."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = 0

    def _run(self) -> None:
        while not self._done.is_set():
            self.most = max(self.most, memory(self._processes))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def processes_of(troupe: Any, channel: Channel) -> list[int]:
    backend: Any = channel._backend
    backend.connect()
    return [troupe.call(0, pid), troupe.call(1, pid), backend.link.outgoing.connection.process.pid, os.getpid()]


@pytest.mark.parametrize("count", [1, 16])
def test_256_mb_take_at_most_one_extra_copy(troupe: Any, channel: Channel, count: int) -> None:
    actors = troupe(2)
    # Once with little, so that everything is imported.
    actors.call(0, prepare, 2 * MB)
    actors.call(0, put, channel, 1)
    actors.call(1, get, channel, 1)
    actors.call(0, prepare, TOTAL // count)
    processes = processes_of(actors, channel)
    before = memory(processes)
    with Peak(processes) as peak:
        getting = actors(1, get, channel, count)
        actors(0, put, channel, count).wait()
        assert getting.wait() == [TOTAL]
    assert peak.most - before <= TOTAL + SLACK
    assert peak.most - before > TOTAL // count // 2, "nothing was measured"


def test_what_went_through_leaves_nothing_but_what_is_used_again(troupe: Any, channel: Channel) -> None:
    actors = troupe(2)
    actors.call(0, prepare, 16 * MB)
    processes = processes_of(actors, channel)
    for round_ in range(6):
        getting = actors(1, get, channel, 8)
        actors(0, put, channel, 8).wait()
        getting.wait()
        if round_ == 1:
            before = memory(processes)
    assert memory(processes) < before + SLACK


def test_no_file_of_shared_memory_has_a_name(troupe: Any, channel: Channel) -> None:
    actors = troupe(2)
    actors.call(0, prepare, 4 * MB)
    actors.call(0, put, channel, 2)
    producer, _, broker, _ = processes_of(actors, channel)
    for process in (producer, broker):
        maps = Path(f"/proc/{process}/maps").read_text()
        # Those of Ray's object store are Ray's.
        assert "/dev/shm/rlinf" not in maps
        assert "memfd:rlinf" in maps
    assert actors.call(1, get, channel, 2) == 8 * MB
