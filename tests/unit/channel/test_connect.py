"""Finding a channel, and what is no channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.channel.channel import Channel
from rlinf_core.channel.launch import ChannelClients, ChannelResolver
from rlinf_core.collective.connections.handshake import ClusterSecret
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import StaticResolver
from rlinf_core.errors import ChannelError, CommunicationTimeoutError, UnknownGroupError
from rlinf_core.supervision.lives import GroupLife
from rlinf_core.waiting import OperationKind
from tests.unit.channel.conftest import SETTINGS, Stage, greeted
from tests.waiting import until


class Register:
    """A manager that learns of a name when it has been asked for it often enough."""

    def __init__(self, *, channel: bool, after: int = 0) -> None:
        self.lookups = 0
        self._channel = channel
        self._after = after

    def group_life(self, name: str, timeout: float) -> GroupLife:
        del timeout
        if self.lookups < self._after:
            raise UnknownGroupError(name, ())
        return GroupLife(1, ("node 0",), self._channel)

    def lookup(self, address: WorkerAddress, timeout: float) -> object:
        del address, timeout
        self.lookups += 1
        return "a info"


@pytest.mark.parametrize("after", [0, 1])
def test_worker_group_is_no_channel_even_when_launched_later(after: int) -> None:
    register = Register(channel=False, after=after)
    resolver = ChannelResolver(cast("Any", register))
    with pytest.raises(ChannelError, match="`c` is a worker group, not a channel"):
        resolver.lookup(WorkerAddress("c", 0), 5)
    assert register.lookups == after


@pytest.mark.parametrize("after", [0, 1])
def test_a_channel_is_found_though_it_is_created_later(after: int) -> None:
    resolver = ChannelResolver(cast("Any", Register(channel=True, after=after)))
    assert resolver.lookup(WorkerAddress("c", 0), 5) == "a info"
    assert resolver.lookup(WorkerAddress("c", 0), -0.1) == "a info"


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
    assert not deaf._pending._open
    assert not deaf._pending._withdrawn


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
        published = [operation.operation for operation in board.publication().operations]
    thread.join(10)
    assert [(item.kind, item.target) for item in published] == [(kind, "c")]
