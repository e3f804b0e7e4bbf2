"""How often a payload lies in memory on its way through a channel, and a job whose processes are killed at random."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.process.proc import stat
from tests.integration.channel.conftest import pid, process_of
from tests.rlinf_command import output_of
from tests.waiting import until

MB = 1 << 20
TOTAL = 256 * MB
# What interpreters allocate besides, while they work.
SLACK = 24 * MB


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
                    until(lambda process=process: stat(process).is_stopped, pause=0.0005)
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


def processes_of(troupe: Any, channel: Channel) -> list[int]:
    return [troupe.call(0, pid), troupe.call(1, pid), process_of(channel)]


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


_SCRIPT = Path(__file__).with_name("soak.py")
_ROOT = Path(__file__).parents[3]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path that leaves room for unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as name:
        yield Path(name)


def soak(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    books, temporary = folder / "books", folder / "tmp"
    books.mkdir()
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(_ROOT)}
    words = (str(seconds), str(seed), str(books))
    printed = output_of(sys.executable, _SCRIPT, *words, env=environ, timeout=seconds + 120)
    report = json.loads(printed.strip().splitlines()[-1])
    # The guardian of the embedded Ray ends a moment after its driver, and is one of these processes.
    deadline = time.monotonic() + 10
    while (left := _processes_with(str(temporary))) and time.monotonic() < deadline:
        time.sleep(0.05)
    report["processes"] = left
    # But for the folder in which drivers make their own.
    report["left"] = [str(path) for path in temporary.rglob("*") if path.name != f"rlinf-{os.getuid()}"]
    return report


def _processes_with(folder: str) -> list[str]:
    """Return the processes that were given this temporary folder and still live."""
    result: list[str] = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if f"TMPDIR={folder}".encode() in (path / "environ").read_bytes():
                    result.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return result


def check_report(report: dict[str, Any]) -> None:
    # How much goes through and how often it kills depends on the machine; that some does, on us.
    assert report["accepted"] > 0
    assert report["kills"] > 0
    assert report["twice"] == []
    assert report["from nowhere"] == []
    assert report["although refused"] == []
    assert report["not taken"] == 0
    assert report["signed and not got"] == 0
    assert report["got and not signed"] == 0, "a consumer's signatures are not written down"
    assert report["missing"] <= report["taken and not written down"] <= report["signed by the dead"]
    assert report["processes of channels"] == 0
    assert report["shared memory held here"] == 0
    memory: list[int] = report["memory"]
    third = max(1, len(memory) // 3)
    assert median(memory[-third:]) < median(memory[:third]) + 8 * MB
    assert max(report["descriptors"][-3:]) <= max(report["descriptors"][:3]) + 12
    assert report["descriptors at the end"] <= report["descriptors"][0]
    assert [name for name in report["threads here"] if name.startswith(("rlinf-send", "rlinf-channel"))] == []
    assert report["left"] == []
    assert report["processes"] == []


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_30_seconds(short_folder: Path) -> None:
    check_report(soak(30, 1, short_folder))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_10_minutes(short_folder: Path) -> None:
    check_report(soak(600, int.from_bytes(os.urandom(4)), short_folder))
