"""Resolution of addresses to endpoints, by asking the register, which the data plane does not know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.errors import PeerNotFoundError


class Resolver(ABC):
    """Finds the endpoint at which a worker lives."""

    @abstractmethod
    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        """Return the info of the endpoint of `address`, waiting at most `timeout` seconds for it to be published.

        Called again after a connection was lost, so it must answer with what holds now.

        Raises:
            UnknownGroupError: no such group will ever be.
            PeerNotFoundError: it was not published in time.
            WorkerDiedError: it is known to be dead.
        """


class StaticResolver(Resolver):
    """Knows every endpoint from the start."""

    def __init__(self, endpoints: Mapping[WorkerAddress, EndpointInfo]) -> None:
        self.endpoints = dict(endpoints)

    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        info = self.endpoints.get(address)
        if info is None:
            raise PeerNotFoundError(address.get_name(), f"`{address.get_name()}` has no known endpoint")
        return info
