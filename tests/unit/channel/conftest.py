"""A broker and its clients, each with an endpoint of its own, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.channel.broker import Broker
from rlinf_core.channel.broker_clients import MIB, MemoryGate
from rlinf_core.channel.channel import Channel
from rlinf_core.channel.launch import ChannelClients
from rlinf_core.channel.wire import ID_STEP, ClientMailbox, slot_of
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Settings, StaticResolver
from rlinf_core.collective.handshake import ClusterSecret
from tests.waiting import until

SETTINGS = Settings(timeout=20.0, connect_timeout=5.0, arena_bytes=32 << 20)


class Stage:
    """A channel `c` and its clients."""

    def __init__(self, maxsize: int = 0) -> None:
        self.secret = ClusterSecret.generate()
        self.free = 1 << 40
        self.endpoints: dict[str, Endpoint] = {}
        self.gate = MemoryGate(lambda: self.free, reserve=64 * MIB)
        self.broker = Broker("c", self.endpoint("c:0"), maxsize, gate=self.gate)

    def endpoint(self, name: str) -> Endpoint:
        made = self.endpoints[name] = Endpoint(self.secret, ip="127.0.0.1", settings=SETTINGS)
        return made

    def client(self, name: str, *, tcp: bool = False) -> Channel:
        """Return `tcp`: as from another host."""
        info = self.endpoints["c:0"].info
        resolver = StaticResolver({WorkerAddress("c", 0): replace(info, unix_path=None) if tcp else info})
        clients = ChannelClients(self.endpoint(name), WorkerAddress.from_name(name), resolver)
        return Channel("c", clients.client("c"))

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.fixture(params=["of a job", "local"])
def channel(request: pytest.FixtureRequest, stage: Stage) -> Channel:
    """One of each kind."""
    return stage.client("p:0") if request.param == "of a job" else Channel.create("c", local=True)


def greeted(stage: Stage, name: str) -> Channel:
    """Return a client that has put and got."""
    made = stage.client(name)
    made.put("first", key="greeting")
    assert made.get("greeting") == "first"
    return made


def slots_of(channel: Channel) -> ClientMailbox:
    backend: Any = channel._backend
    return backend.pending.mailbox


def check_nothing_is_left(channel: Channel) -> None:
    """Every box is free, and no operation is remembered."""
    backend: Any = channel._backend
    until(lambda: not backend.pending._open and not backend.pending._withdrawn)
    slots = slots_of(channel)
    taken = [slot_of(slots.reserve(number * ID_STEP)) for number in range(10**6, 10**6 + ID_STEP)]
    assert sorted(taken) == list(range(ID_STEP))
