"""The clients of all channels in one process."""

from __future__ import annotations

import threading

from rlinf_core.address import WorkerAddress
from rlinf_core.channel.client.client import ChannelClient
from rlinf_core.channel.client.pending import Pending
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Resolver


class ChannelClients:
    """The clients of all channels of one process, by name.

    Args:
        me: the address of the worker that this process is, or of the driver.
    """

    def __init__(self, endpoint: Endpoint, me: WorkerAddress, resolver: Resolver) -> None:
        self._endpoint = endpoint
        self._me = me
        self._resolver = resolver
        self._pending = Pending(endpoint)
        self._lock = threading.Lock()
        self._clients: dict[str, ChannelClient] = {}
        self._by_address: dict[str, ChannelClient] = {}
        endpoint.on_peer_lost(self._lost)

    def client(self, name: str) -> ChannelClient:
        with self._lock:
            client = self._clients.get(name)
            if client is None:
                client = ChannelClient(self._endpoint, self._me, self._resolver, self._pending, name)
                self._clients[name] = self._by_address[client.address.get_name()] = client
            return client

    def _lost(self, address: str, reason: str) -> None:
        client = self._by_address.get(address)
        if client is not None:
            client.lost(reason)
