"""How often a payload lies in memory on its way through a channel."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.process.proc import peer_credentials

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
    """Return bytes of all processes: what is each one's own, and each piece of shared memory once, whoever has mapped
    it.

    Not the proportional sizes that the kernel gives: a mailbox that one maps while another is looked at counts twice.
    """
    texts = (Path(f"/proc/{one}/smaps_rollup").read_text() for one in processes)
    own = sum(int(re.findall(r"Anonymous:\s+(\d+)", text)[0]) << 10 for text in texts)
    return own + sum({identity: size for one in processes for identity, size in shared(one)}.values())


def shared(process: int) -> list[tuple[int, int]]:
    """Return the identities and bytes of the shared memory that a process holds open."""
    result: list[tuple[int, int]] = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        # A descriptor may be closed while it is looked at.
        with suppress(FileNotFoundError):
            if os.readlink(path).startswith("/memfd:rlinf"):
                status = path.stat()
                result.append((status.st_ino, status.st_blocks * 512))
    return result


class Peak:
    """The most that some processes took together while a block ran.

    They stand still while they are looked at: a mailbox that two share counts half for each, and would count more than
    once where the second maps it between the two looks.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = 0

    def _run(self) -> None:
        while not self._done.is_set():
            for process in self._processes:
                os.kill(process, signal.SIGSTOP)
            try:
                for process in self._processes:
                    _until_stopped(process)
                self.most = max(self.most, memory(self._processes))
            finally:
                for process in self._processes:
                    os.kill(process, signal.SIGCONT)
            # So that they also get somewhere.
            self._done.wait(0.005)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def _until_stopped(process: int) -> None:
    while Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "T":
        time.sleep(0.0005)


def processes_of(troupe: Any, channel: Channel) -> list[int]:
    backend: Any = channel._backend
    backend.connect()
    return [troupe.call(0, pid), troupe.call(1, pid), peer_credentials(backend.stream.connection.sock)[0]]


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
        # One after the other: as much lies in the channel in each round, however fast the two are.
        actors.call(0, put, channel, 8)
        actors.call(1, get, channel, 8)
        if round_ == 1:
            before = memory(processes)
    assert memory(processes) < before + SLACK


def test_no_file_of_shared_memory_has_a_name(troupe: Any, channel: Channel) -> None:
    actors = troupe(2)
    actors.call(0, prepare, 4 * MB)
    actors.call(0, put, channel, 2)
    producer, _, broker = processes_of(actors, channel)
    for process in (producer, broker):
        maps = Path(f"/proc/{process}/maps").read_text()
        # Those of Ray's object store are Ray's.
        assert "/dev/shm/rlinf" not in maps
        assert "memfd:rlinf" in maps
    assert actors.call(1, get, channel, 2) == 8 * MB
