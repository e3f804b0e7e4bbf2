"""A job of its own that puts and gets without rest while its processes are killed at random, and keeps the books.

    python soak.py SECONDS SEED FOLDER

It runs for SECONDS from the moment when a cluster is there.

Every process writes down what it does before and after it does it, in a file that survives it. At the end the books are
compared with each other and with the channels' statistics, and a report is printed as one line of JSON.

A consumer that is killed may take along what it had signed for and not written down yet, and nothing else: it notes the
moment just before it signs.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf_core.channel.channel import Channel
from rlinf_core.channel.queue_state import KeyStatistics
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import ChannelClosed, CommunicationTimeoutError, RLinfError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup

KEYS = ("red", "green", "blue")
SIZES = (10, 10, 10, 1_000, 1_000, 50_000, 300_000, 3_000_000)
BATCH = 4
CHANNELS = {"soak_open": 0, "soak_bounded": 12}
ROLES = ("produce", "produce", "produce", "consume", "consume", "consume")


class Book:
    """One process's file: each line is written at once, so that it is there whatever becomes of the process."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def item(identity: str, size: int) -> dict[str, Any]:
    return {"id": identity, "bytes": bytes([len(identity) % 256]) * size}


def check(got: dict[str, Any]) -> str:
    identity = got["id"]
    content = got["bytes"]
    if content != bytes([len(identity) % 256]) * len(content):
        raise AssertionError(f"{identity} arrived damaged")
    return identity


def note_signatures(channel: Channel, book: Book) -> None:
    """Write down when this process is about to sign for what it gets through a channel."""
    backend: Any = channel._backend
    pending = backend.pending
    take, sign = pending._taken, pending._sign
    # It is signed by the thread that takes: the one that reads, or the one that waits.
    here = threading.local()

    def note_count(request: Any, ack_slot: int, pieces: Any) -> None:
        here.count = len(pieces)
        take(request, ack_slot, pieces)

    def note(*of: Any) -> None:
        book.write("signs", here.count)
        sign(*of)

    pending._taken, pending._sign = note_count, note


class Actor(Worker):
    """Produces or consumes until a moment."""

    def pid(self) -> int:
        return os.getpid()

    def produce(self, channels: list[Channel], until: float, seed: int, folder: str, name: str) -> int:
        dice, book, count = random.Random(seed), Book(folder, name), 0
        # Not as long as the consumers, so that none is held back at the end.
        while time.time() < until - 2:
            channel, key = dice.choice(channels), dice.choice(KEYS)
            burst = dice.choice((1, 1, 1, 20))
            handles = []
            for _ in range(burst):
                identity = f"{name}.{count}"
                count += 1
                book.write("put", identity)
                thing = item(identity, dice.choice(SIZES))
                try:
                    if burst > 1:
                        handles.append((identity, channel.put(thing, 1, key, async_op=True, timeout=1)))
                    else:
                        channel.put(thing, 1, key, timeout=dice.choice((0.01, 1)))
                        book.write("accepted", identity)
                except CommunicationTimeoutError:
                    book.write("refused", identity)
            for identity, handle in handles:
                try:
                    handle.wait()
                    book.write("accepted", identity)
                except CommunicationTimeoutError:
                    book.write("refused", identity)
        book.close()
        return count

    def consume(self, channels: list[Channel], until: float, seed: int, folder: str, name: str) -> int:
        dice, book, count = random.Random(seed), Book(folder, name), 0
        for channel in channels:
            note_signatures(channel, book)
        while time.time() < until:
            channel, key = dice.choice(channels), dice.choice(KEYS)
            size = dice.choice((1, 1, BATCH))
            patience = dice.choice((0.001, 0.02, 0.3))
            try:
                got = (
                    [channel.get(key, timeout=patience)]
                    if size == 1
                    else channel.get_batch(size, key, timeout=patience)
                )
            except (CommunicationTimeoutError, RLinfError):
                book.write("nothing")
                continue
            book.write("got", *map(check, got))
            count += len(got)
        book.close()
        return count


@dataclass
class Actors:
    """The living ones, each a group of one, relaunched under its name when it was killed."""

    cluster: Cluster
    folder: str
    until: float
    channels: list[Channel]
    lives: int = 0
    kills: int = 0
    groups: dict[str, WorkerGroup[Actor]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    handles: dict[str, Any] = field(default_factory=dict)

    def launch(self, name: str, role: str, seed: int) -> None:
        group = Actor.create_group().launch(self.cluster, NodePlacementStrategy([0]), name=name)
        self.lives += 1
        self.groups[name] = group
        self.pids[name] = group.pid().wait()[0]
        method = getattr(group, role)
        self.handles[name] = method(self.channels, self.until, seed, self.folder, f"{role}-{name}-{self.lives}")

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)
        self.kills += 1
        # Its call has failed, of course.
        with suppress(RLinfError):
            self.groups[name].shutdown()

    def finish(self) -> None:
        for name, handle in self.handles.items():
            handle.wait()
            self.groups[name].shutdown()


def channel_pids() -> list[int]:
    result = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if b"ray::ChannelProcess" in (path / "cmdline").read_bytes() and _is_ours(int(path.name)):
                    result.append(int(path.name))
            except OSError:
                continue
    return result


def _is_ours(pid: int) -> bool:
    """Return whether a process descends from this one."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def memory(pid: int) -> int:
    """Return bytes of a process, each mailbox that it shares counted in part."""
    return int(re.findall(r"Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[0]) << 10


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def settle_books(folder: str, rest: list[str], statistics: list[KeyStatistics]) -> dict[str, Any]:
    """Compare what was put with what was got, and both with what the channels counted."""
    accepted: set[str] = set()
    announced: set[str] = set()
    refused: set[str] = set()
    got: Counter[str] = Counter(rest)
    signed_by_the_dead = 0
    signed_in_vain = 0
    unsigned = 0
    for path in Path(folder).iterdir():
        signed = 0
        for line in path.read_text().splitlines():
            word, *words = line.split()
            if word == "signs":
                signed = int(words[0])
            elif word == "got":
                unsigned += abs(len(words) - signed)
                signed = 0
                got.update(words)
            elif word == "nothing":
                signed_in_vain += signed
                signed = 0
            else:
                {"put": announced, "accepted": accepted, "refused": refused}[word].update(words)
        # A consumer that was killed between signing and writing down took those along.
        signed_by_the_dead += signed
    return {
        "put": len(announced),
        "accepted": len(accepted),
        "got": len(got),
        "twice": sorted(one for one, count in got.items() if count > 1),
        "from nowhere": sorted(set(got) - announced),
        "although refused": sorted(set(got) & refused),
        "missing": len(accepted - set(got)),
        "taken and not written down": sum(one.gets for one in statistics) - len(got),
        "not taken": sum(one.puts - one.gets for one in statistics),
        "signed by the dead": signed_by_the_dead,
        "signed and not got": signed_in_vain,
        "got and not signed": unsigned,
    }


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    """Until it holds, or for so long: the report tells then that it did not."""
    deadline = time.time() + seconds
    while not condition() and time.time() < deadline:
        time.sleep(0.1)


def figures(channels: list[Channel]) -> list[KeyStatistics]:
    return [one for channel in channels for one in channel.statistics().values()]


def run(seconds: float, seed: int, folder: str) -> dict[str, Any]:
    dice = random.Random(seed)
    with Cluster(num_nodes=1) as cluster:
        channels = [Channel.create(name, maxsize) for name, maxsize in CHANNELS.items()]
        brokers = channel_pids()
        until = time.time() + seconds
        actors = Actors(cluster, folder, until, channels)
        roles = {f"actor{index}": role for index, role in enumerate(ROLES)}
        for name, role in roles.items():
            actors.launch(name, role, dice.getrandbits(32))
        samples: list[tuple[int, int]] = []
        while not actors.kills or time.time() < until - 4:
            time.sleep(dice.uniform(0.2, 1.5))
            name = dice.choice(sorted(roles))
            actors.kill(name)
            actors.launch(name, roles[name], dice.getrandbits(32))
            samples.append((max(map(memory, brokers)), max(map(descriptors, brokers))))
        actors.finish()
        # What belonged to the killed is given back by housekeeping.
        wait_for(lambda: max(map(descriptors, brokers)) <= 60)
        report: dict[str, Any] = {
            "kills": actors.kills,
            "memory": [one for one, _ in samples],
            "memory at the end": max(map(memory, brokers)),
            "descriptors": [one for _, one in samples],
            "descriptors at the end": max(map(descriptors, brokers)),
        }
        rest: list[str] = []
        for channel in channels:
            channel.close()
            for key in KEYS:
                while True:
                    try:
                        rest += map(check, channel.get_batch(1e9, key))
                    except ChannelClosed:
                        break
        # What was taken is counted by the next message of whoever took it, or by housekeeping.
        wait_for(lambda: all(one.puts == one.gets for one in figures(channels)))
        wait_for(lambda: not channel_pids())
        report |= settle_books(folder, rest, figures(channels))
        report |= {
            "losses": sum(len(channel.losses()) for channel in channels),
            "processes of channels": len(channel_pids()),
            "shared memory held here": cluster.client.endpoint.shared_memory().used,
            "threads here": sorted(thread.name for thread in threading.enumerate()),
        }
    return report


if __name__ == "__main__":
    print(json.dumps(run(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
