"""Finding a channel, and what callers may say to it, whether it is one of a job or a local one."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.address import WorkerAddress
from rlinf_core.channel.channel import Channel
from rlinf_core.channel.launch import ChannelClients
from rlinf_core.channel.operation import ChannelEmpty
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import StaticResolver
from rlinf_core.collective.handshake import ClusterSecret
from rlinf_core.errors import CommunicationTimeoutError, InvalidNameError
from rlinf_core.waiting import OperationKind
from tests.unit.channel.conftest import SETTINGS, Stage, greeted
from tests.waiting import until


@pytest.fixture
def deaf() -> Iterator[Any]:
    """A channel `c` that does not answer."""
    secret, settings = ClusterSecret.generate(), replace(SETTINGS, connect_timeout=0.2)
    broker, mine = (Endpoint(secret, ip="127.0.0.1", settings=settings) for _ in range(2))
    resolver = StaticResolver({WorkerAddress("c", 0): broker.info})
    yield ChannelClients(mine, WorkerAddress("p", 0), resolver).client("c")
    for endpoint in (mine, broker):
        endpoint.close()


def test_connect_has_a_deadline_of_its_own(deaf: Any) -> None:
    for connect in (deaf.connect, lambda: deaf.get("k", None, wait=True, timeout=None, detached=False)):
        with pytest.raises(CommunicationTimeoutError, match=r"`connect to c` did not finish in 0.4 s"):
            connect()
    with pytest.raises(CommunicationTimeoutError, match=r"`connect to c` did not finish in 0.1 s"):
        deaf.connect(0.1)
    # There is nothing to be undone, which would take time of its own.
    assert not deaf.pending._open
    assert not deaf.pending._withdrawn


@pytest.mark.parametrize("poll", [lambda channel: channel.get(timeout=0), lambda channel: channel.put(1, timeout=0)])
def test_a_poll_of_a_channel_that_hangs_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, poll: Callable[[Channel], object]
) -> None:
    channel: Any = greeted(stage, "p:0")
    channel._backend._endpoint.settings = replace(SETTINGS, timeout=1e6, connect_timeout=0.2)
    monkeypatch.setattr("rlinf_core.channel.operation._GRACE", 0.1)
    with stage.broker._lock, pytest.raises(CommunicationTimeoutError, match=r"did not finish in 0.2 s"):
        poll(channel)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (Channel.qsize, OperationKind.QUERY),
        (Channel.statistics, OperationKind.QUERY),
        (Channel.peek_all, OperationKind.QUERY),
        (Channel.close, OperationKind.CLOSE),
    ],
)
def test_requests_and_closing_are_not_published_as_put_or_get(
    stage: Stage, operation: Callable[[Channel], object], kind: OperationKind
) -> None:
    channel = greeted(stage, "p:0")
    board = stage.endpoints["p:0"].waits.operations
    thread = threading.Thread(target=operation, args=(channel,))
    with stage.broker._lock:
        thread.start()
        until(lambda: board.publication().operations)
        published = list(board.publication().operations)
    thread.join(10)
    assert [(item.kind, item.target) for item in published] == [(kind, "c")]


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan")])
def test_what_is_no_time_is_refused_and_nothing_is_put(timeout: float) -> None:
    channel = Channel.create("mailbox", local=True)
    with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
        channel.put(1, timeout=timeout)
    with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
        channel.get(timeout=timeout)
    handle = channel.get(async_op=True)
    with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
        handle.wait(timeout)
    channel.put(2)
    assert handle.wait(5) == 2


def test_a_local_channel_is_on_no_other_node() -> None:
    with pytest.raises(ValueError, match="give `node_rank` or `local`, not both"):
        Channel.create("mailbox", node_rank=1, local=True)


class Inbox(Channel):
    pass


def test_a_channel_of_a_subclass_stays_one_when_it_is_sent() -> None:
    assert type(pickle.loads(pickle.dumps(Inbox("mailbox")))) is Inbox


@pytest.mark.parametrize("maxsize", [-1, 2.5, "4", float("nan"), None])
def test_a_bound_is_a_whole_number(maxsize: object) -> None:
    with pytest.raises(ValueError, match=r"`maxsize` is .*, expected an integer >= 0"):
        Channel.create("mailbox", maxsize, local=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("weight", [-1, "3", float("nan"), None])
def test_a_weight_is_a_number(weight: object) -> None:
    channel = Channel.create("mailbox", local=True)
    with pytest.raises(ValueError, match=r"`weight` is .*, expected a finite number from 0"):
        channel.put(1, weight)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ValueError, match=r"`batch_weight` is .*, expected a finite number above 0"):
        channel.get_batch(weight)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert channel.empty()


def test_a_key_without_letters_is_a_queue_of_its_own(channel: Channel) -> None:
    channel.put("of no key")
    channel.put("of the empty key", key="")
    handle = channel.put("put without waiting", key="", async_op=True)
    handle.wait()
    assert (channel.qsize(), channel.qsize(key="")) == (1, 2)
    assert channel.peek_all() == channel.peek_all("default") == ["of no key"]
    assert set(channel.statistics()) == {"default", ""}
    assert channel.get(key="") == "of the empty key"
    assert channel.get() == "of no key"
    assert channel.get_nowait(key="") == "put without waiting"


def test_batch_by_another_name_of_its_weight_is_refused(channel: Channel) -> None:
    taking: Any = channel.get_batch
    with pytest.raises(TypeError, match=r"no argument `target_weight`: the weight of a batch is `batch_weight`"):
        taking(target_weight=1)


NO_AMOUNTS: list[Any] = [
    -1,
    float("nan"),
    float("inf"),
    10**400,
    10**5000,
    "3",
    [1],
    1j,
    np.array([1, 2]),
    torch.tensor([1.0, 2.0]),
]


@pytest.mark.parametrize("number", [*NO_AMOUNTS, None], ids=type)
def test_what_is_no_weight_is_refused_and_nothing_is_lost(channel: Channel, number: Any) -> None:
    with pytest.raises(ValueError, match=r"^`weight` is .*, expected a finite number from 0$"):
        channel.put(1, weight=number)
    with pytest.raises(ValueError, match=r"^`weight` is .*, expected a finite number from 0$"):
        channel.put_nowait(1, weight=number)
    with pytest.raises(ValueError, match=r"^`batch_weight` is .*, expected a finite number above 0$"):
        channel.get_batch(number)
    channel.put("there", weight=1)
    assert channel.get_batch(1, timeout=10) == ["there"]


@pytest.mark.parametrize("number", NO_AMOUNTS, ids=type)
def test_what_is_no_time_is_refused_and_nothing_is_lost(channel: Channel, number: Any) -> None:
    said = r"^a timeout is a number of seconds from 0, (not|and this one exceeds)"
    with pytest.raises(ValueError, match=said):
        channel.put(1, timeout=number)
    with pytest.raises(ValueError, match=said):
        channel.get(timeout=number)
    with pytest.raises(ValueError, match=said):
        channel.get_batch(1, timeout=number)
    with pytest.raises(ValueError, match=said):
        channel.close(timeout=number)
    for ask in (channel.qsize, channel.empty, channel.full, channel.peek_all, channel.statistics, channel.losses):
        with pytest.raises(ValueError, match=said):
            ask(timeout=number)
    handle = channel.get(async_op=True)
    with pytest.raises(ValueError, match=said):
        handle.wait(number)
    channel.put("there")
    assert handle.wait(10) == "there"


@pytest.mark.parametrize("number", [*NO_AMOUNTS, 2.5, None], ids=type)
def test_what_is_no_bound_is_refused(number: Any) -> None:
    for local in (False, True):
        with pytest.raises(ValueError, match=r"^`maxsize` is .*, expected an integer >= 0"):
            Channel.create("bounded", number, local=local)


@pytest.mark.parametrize("number", [np.float32(2), np.int64(2), torch.tensor(2.0), True, 2**70])
def test_numbers_of_other_libraries_are_numbers(channel: Channel, number: Any) -> None:
    channel.put("there", weight=number)
    ten: Any = np.float32(10)
    assert channel.get_batch(number, timeout=ten) == ["there"]
    assert Channel.create("bounded", number, local=True).maxsize == int(number)


@pytest.mark.parametrize("key", ["\ud800", "caf\ud800"])
def test_a_key_that_cannot_be_sent_is_refused(channel: Channel, key: str) -> None:
    calls = [
        lambda: channel.put(1, key=key),
        lambda: channel.get(key=key),
        lambda: channel.get_batch(1, key=key),
        lambda: channel.get_nowait(key=key),
        lambda: channel.qsize(key=key),
        lambda: channel.peek_all(key=key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"a key is text, and .* holds half a character"):
            call()
    assert channel.statistics() == {}


@pytest.mark.parametrize("key", ["caf\u00e9", "\u6d41", "a\0b", "line\nline", "k" * 70_000])
def test_any_text_is_a_key(channel: Channel, key: str) -> None:
    channel.put("there", key=key)
    assert channel.get(key=key, timeout=10) == "there"


@pytest.mark.parametrize("key", [None, 3, -1.5, b"default", ("actor", 0), (1, (2, "a"), None), np.int64(7), True])
def test_any_plain_value_is_a_key(channel: Channel, key: Any) -> None:
    channel.put("there", key=key)
    channel.put("elsewhere", key=str(key))
    assert set(channel.statistics()) == {key, str(key)}
    assert channel.get(key=key, timeout=10) == "there"
    with pytest.raises(ChannelEmpty) as caught:
        channel.get_nowait(key=key)
    assert caught.value.key == key
    with pytest.raises(CommunicationTimeoutError) as late:
        channel.get(key=key, timeout=0)
    assert "\u2063" not in f"{caught.value} {late.value}"


class Side(StrEnum):
    LEFT = "left"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ((0, 1), (0.0, np.int32(1))),
        ("left", Side.LEFT),
        (("left", 1), (Side.LEFT, 1)),
        (("left", 1), (np.str_("left"), 1)),
        (b"left", np.bytes_(b"left")),
    ],
)
def test_keys_that_are_equal_are_one_key(channel: Channel, one: Any, other: Any) -> None:
    channel.put("there", key=one)
    channel.put("after", key=other)
    assert set(channel.statistics()) == {one}
    assert [channel.get(key=other, timeout=10), channel.get(key=one, timeout=10)] == ["there", "after"]


@pytest.mark.parametrize("key", [[3], {"a": 1}, object(), float("nan"), float("inf"), (object(),), 1j])
def test_what_is_no_plain_value_is_no_key(channel: Channel, key: Any) -> None:
    with pytest.raises(TypeError, match="a key is text, a number, None, bytes or a tuple of such, not"):
        channel.put(1, key=key)


def test_text_that_could_be_taken_for_another_key_is_refused(channel: Channel) -> None:
    with pytest.raises(ValueError, match="must not begin with the invisible character"):
        channel.put(1, key="\u20633")


@pytest.mark.parametrize("name", [None, 3, "", "a:b", "two\nlines", "\0", "\ud800", b"c"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    for call in (
        lambda: Channel.create(name, local=True),
        lambda: Channel.create(name),
        lambda: Channel.connect(name),
    ):
        with pytest.raises(InvalidNameError, match="is not a valid name of a channel") as info:
            call()
        assert "\n" not in info.value.message
