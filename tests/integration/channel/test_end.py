"""A channel that is closed and drained needs no process any more, and is closed for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.errors import ChannelClosed, InvalidNameError
from rlinf_core.process.proc import peer_credentials

Until = Callable[[Callable[[], object]], None]
_names = itertools.count()


def process_of(channel: Channel) -> int:
    backend: Any = channel._backend
    backend.connect()
    return peer_credentials(backend.stream.outgoing.connection.sock)[0]


def is_gone(process: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{process}").exists()


def get_all(worker: Any, channel: Channel) -> list[Any]:
    return list(channel)


def try_all(worker: Any, channel: Channel) -> list[str]:
    """Return what each operation raises."""
    said: list[str] = []
    for operation in (
        lambda: channel.put(1),
        lambda: channel.put_nowait(1),
        lambda: channel.put(1, async_op=True).wait(),
        lambda: channel.put(bytes(8 << 20)),
        lambda: channel.get(),
        lambda: channel.get_nowait(),
        lambda: channel.get_batch(3),
        lambda: channel.get(async_op=True).wait(),
    ):
        try:
            operation()
        except ChannelClosed as error:
            said.append(error.message.rpartition(", ")[2])
    return said


SAID = ["the item was not accepted"] * 4 + ["and nothing is left in it"] * 4


def test_ended_process_reports_closed_to_later_calls(troupe: Any, until: Until) -> None:
    channel = Channel.create(f"ends{next(_names)}")
    actors = troupe(2)
    for item in range(3):
        channel.put(item)
    process = process_of(channel)
    channel.close()
    assert actors.call(0, get_all, channel) == [0, 1, 2]
    until(is_gone(process))
    # Those who were connected, and one who comes only now.
    assert try_all(None, channel) == SAID
    assert actors.call(0, try_all, channel) == SAID
    assert actors.call(1, try_all, channel) == SAID
    assert list(channel) == list(Channel.connect(channel.name)) == []
    channel.close()
    assert (channel.qsize(), channel.full(), channel.peek_all(), channel.losses()) == (0, False, [], [])
    figures = channel.statistics()["default"]
    assert (figures.puts, figures.gets) == (3, 3)
    with pytest.raises(InvalidNameError, match=f"a channel named `{channel.name}` existed and is closed"):
        Channel.create(channel.name)
