"""Two processes' endpoints in one process, over a unix socket or over TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Settings, StaticResolver
from rlinf_core.collective.handshake import ClusterSecret

HERE, THERE = WorkerAddress("here", 0), WorkerAddress("there", 0)


class Pair:
    """Two endpoints that know each other. `tcp`: as on two hosts."""

    def __init__(self, *, tcp: bool, **settings: Any) -> None:
        self.tcp = tcp
        self.secret = ClusterSecret.generate()
        self.settings = Settings(**{"timeout": 20.0, "connect_timeout": 5.0, "arena_bytes": 32 << 20, **settings})
        self.resolver = StaticResolver({})
        self.endpoints: list[Endpoint] = []
        self.here = self.join(HERE)
        self.there = self.join(THERE)

    def join(self, address: WorkerAddress) -> CollectiveGroup:
        """Return the group of a new endpoint with this address, which takes the place of an earlier one."""
        endpoint = Endpoint(self.secret, ip="127.0.0.1", settings=self.settings)
        self.endpoints.append(endpoint)
        info = replace(endpoint.info, unix_path=None) if self.tcp else endpoint.info
        self.resolver.endpoints[address] = info
        return CollectiveGroup(endpoint, address, (HERE, THERE), self.resolver)

    @property
    def near(self) -> Endpoint:
        return self.endpoints[0]

    @property
    def far(self) -> Endpoint:
        return self.endpoints[-1]

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close(linger=0.0)


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**options: Any) -> Pair:
        made.append(Pair(**options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(tcp=request.param == "tcp")
