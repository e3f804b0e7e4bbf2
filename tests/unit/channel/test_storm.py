"""Every operation of a channel at once, by many threads, with hardly any time: what is said is what happened."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.channel.operation import ChannelEmpty, ChannelFull
from rlinf_core.errors import CommunicationTimeoutError
from tests.unit.channel.conftest import Stage, check_nothing_is_left, greeted

KEYS = ("a", "b", "c")
# Packed; too large for a box; a message of their own.
SIZES = (0, 10, 500, 990, 1100, 5000, 40_000)
TIMEOUTS = (0, 0.0002, 0.0005, 0.001, 0.002, 0.2, 0.2)
ALL_TRUE: dict[str, list[int]] = {"twice": [], "lost": [], "refused and yet there": []}
NOT_DONE = (CommunicationTimeoutError, ChannelEmpty, ChannelFull)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads change places ten times as often as they would."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    yield
    sys.setswitchinterval(interval)


class Books:
    """What was said of each item."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.accepted: set[int] = set()
        self.refused: set[int] = set()
        self.got: Counter[int] = Counter()
        self.lock = threading.Lock()

    def note_got(self, items: list[tuple[int, bytes]]) -> None:
        with self.lock:
            self.got.update(number for number, _ in items)


def blow(channel: Channel, books: Books, seed: int, end: float) -> None:
    """Operations of one thread, drawn at random."""
    dice = random.Random(seed)
    while time.monotonic() < end:
        key, timeout = dice.choice(KEYS), dice.choice(TIMEOUTS)
        if dice.random() < 0.5:
            number = next(books.numbers)
            item = (number, bytes(dice.choice(SIZES)))
            try:
                match dice.randrange(4):
                    case 0:
                        channel.put_nowait(item, 1, key)
                    case 1:
                        channel.put(item, 1, key, async_op=True, timeout=timeout).wait()
                    case _:
                        channel.put(item, 1, key, timeout=timeout)
                books.accepted.add(number)
            except NOT_DONE:
                books.refused.add(number)
            continue
        try:
            match dice.randrange(5):
                case 0:
                    books.note_got([channel.get_nowait(key)])
                case 1:
                    books.note_got([channel.get(key, async_op=True, timeout=timeout).wait()])
                case 2:
                    books.note_got(channel.get_batch(dice.randrange(1, 4), key, timeout=timeout))
                case _:
                    books.note_got([channel.get(key, timeout=timeout)])
        except NOT_DONE:
            continue


def storm(stage: Stage, seconds: float, seed: int) -> dict[str, list[int]]:
    """Return the items of which something else was said than what happened to them, by what is wrong."""
    channels = [greeted(stage, "one:0"), greeted(stage, "two:0"), stage.client("far:0", tcp=True)]
    channels[2].put("first", key="greeting")
    assert channels[2].get("greeting") == "first"
    books, end = Books(), time.monotonic() + seconds
    threads = [
        threading.Thread(target=blow, args=(channels[number % 3], books, seed + number, end)) for number in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    assert not any(thread.is_alive() for thread in threads), f"seed {seed}"
    for key in KEYS:
        while channels[0].qsize(key):
            books.note_got([channels[0].get_nowait(key)])
    assert books.accepted, "nothing went through"
    assert books.refused, "nothing was too late"
    for channel in channels[:2]:
        check_nothing_is_left(channel)
    stage.close()
    return {
        "twice": sorted(number for number, count in books.got.items() if count > 1),
        "lost": sorted(books.accepted - set(books.got)),
        "refused and yet there": sorted(books.refused & set(books.got)),
    }


def test_a_second(restless: None) -> None:
    assert storm(Stage(maxsize=4), 1, seed=1) == ALL_TRUE


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_two_minutes(restless: None) -> None:
    for _ in range(4):
        seed = int.from_bytes(os.urandom(4))
        assert storm(Stage(maxsize=4), 30, seed) == ALL_TRUE, f"seed {seed}"
