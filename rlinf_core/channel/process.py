"""The actor in which the queues of a channel live."""

from __future__ import annotations

import threading
from dataclasses import replace

from rlinf_core.address import WorkerAddress
from rlinf_core.channel.broker import Broker
from rlinf_core.cluster.job import advertised
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.collective.settings import Settings
from rlinf_core.context import Session
from rlinf_core.manager.client import ManagerClient
from rlinf_core.manager.registry import CLOSED

# How long it looks for the next message before it sleeps: it does nothing else, and being woken takes longer.
_SPIN_SECONDS = 50e-6
# How often it looks for what no message tells of.
_HOUSEKEEPING_SECONDS = 1.0
# How long its last words may take to leave.
_LINGER_SECONDS = 5.0


class ChannelProcess:
    """One process for each channel. Ray creates and ends it, and carries no message of it.

    It ends with the job, or before when the channel is closed and drained.

    Args:
        session: the job.
        manager: where its manager is.
        name: of the channel.
        maxsize: how many items each key holds; 0 means any number.
        incarnation: which life of the name this is.
        ip: the address under which other nodes reach this one.
        node_rank: the rank of the node.
    """

    def __init__(
        self,
        session: Session,
        manager: EndpointInfo,
        name: str,
        maxsize: int,
        incarnation: int,
        ip: str,
        node_rank: int,
    ) -> None:
        self._name = name
        me = WorkerAddress(name).get_child_address(0)
        settings = replace(Settings.from_environment(), reactor_spin=_SPIN_SECONDS)
        self._client = ManagerClient(session, manager, me, ip=advertised(ip), settings=settings)
        self._broker = broker = Broker(name, self._client.endpoint, maxsize)
        self._client.channels = lambda: {name: broker.view()}
        self._client.announce(incarnation, f"node {node_rank} ({ip})", node_rank)
        threading.Thread(target=self._keep_house, name="rlinf-housekeeping", daemon=True).start()

    def __repr__(self) -> str:
        """Return what Ray puts before each line that this process prints."""
        return f"channel {self._name}"

    def ready(self) -> None:
        """Answer once the channel is there."""

    def _keep_house(self) -> None:
        pause = threading.Event()
        while not pause.wait(_HOUSEKEEPING_SECONDS):
            self._broker.keep_house()
            if self._broker.announce_end():
                self._end()
                return

    def _end(self) -> None:
        self._client.say_last_words(CLOSED)
        self._client.close(linger=_LINGER_SECONDS)
        ray = ray_api()
        # As if whoever started it did so: an end by itself would be told to the user as an accident.
        ray.kill(ray.get_runtime_context().current_actor)
