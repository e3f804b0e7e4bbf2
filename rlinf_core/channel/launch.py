"""The launch of channels: the job's manager starts their processes, so that they outlive their creator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf_core.address import WorkerAddress, check_name
from rlinf_core.channel import wire
from rlinf_core.channel.broker import Broker
from rlinf_core.channel.client import ChannelClient
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import EndpointInfo, Resolver, Settings, advertised_on
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.context import Session, current_session
from rlinf_core.errors import ClusterError, PeerNotFoundError, RuntimeFailure, UnknownGroupError
from rlinf_core.node import stacks
from rlinf_core.suggest import as_index, short_repr
from rlinf_core.supervision.client import ManagerClient, current_client
from rlinf_core.supervision.lives import CLOSED, MANAGER
from rlinf_core.waiting import contact_seconds


class ChannelClients:
    """The clients of all channels of one process.

    Args:
        me: the address of this process: a worker or the driver.
    """

    def __init__(self, endpoint: Endpoint, me: WorkerAddress, resolver: Resolver) -> None:
        self._endpoint = endpoint
        self._me = me
        self._resolver = resolver
        self._lock = threading.Lock()
        # By the address of the channel's process.
        self._clients: dict[str, ChannelClient] = {}
        endpoint.serve(wire.REPLIES, self._reply)
        endpoint.on_peer_lost(self._lost)
        endpoint.on_close(self._fail_all)

    def client(self, name: str) -> ChannelClient:
        address = WorkerAddress(name).get_child_address(0).get_name()
        with self._lock:
            client = self._clients.get(address)
            if client is None:
                client = self._clients[address] = ChannelClient(self._endpoint, self._me, self._resolver, name)
            return client

    def _reply(self, stream: PeerStream, received: ReceivedMessage) -> None:
        self._clients[stream.peer].pending.reply(received)

    def _fail_all(self, error: Exception) -> None:
        for client in list(self._clients.values()):
            client.pending.fail_all(error)

    def _lost(self, address: str, reason: str) -> None:
        client = self._clients.get(address)
        if client is not None:
            client.lost(reason)


_lock = threading.Lock()
_clients: tuple[ManagerClient, ChannelClients] | None = None
# The handles of actors that this process started as the manager: Ray ends an actor when its last handle is gone.
_started: list[Any] = []


@dataclass(frozen=True, slots=True)
class Node:
    """A node on which a channel can live: Ray's id of it in hex, its address for other nodes, and its rank."""

    ray_id: str
    ip: str
    rank: int


class ChannelResolver(Resolver):
    """A resolver of the processes of channels."""

    def __init__(self, manager: ManagerClient) -> None:
        self._manager = manager

    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        return self._manager.lookup(address, timeout, channel=True)


def no_channel(name: str, error: UnknownGroupError | PeerNotFoundError) -> UnknownGroupError | PeerNotFoundError:
    """Return the error for the name of a missing channel; it names the existing channels."""
    try:
        job = _manager().snapshot()
    except RuntimeFailure:
        return error
    if f"{name}:0" in job.workers:
        # The channel exists but cannot be reached.
        return error
    known = tuple(sorted({channel for answer in job.answers.values() for channel in answer.channels}))
    unknown = UnknownGroupError(name, known, where=error.where, kind="channel")
    if isinstance(error, UnknownGroupError):
        return unknown
    return PeerNotFoundError(
        error.address,
        f"{unknown.message}, and none was created in time",
        where=error.where,
        why=unknown.why,
        help=unknown.help,
    )


def clients() -> ChannelClients:
    """Return the clients of the channels that this process uses.

    Raises:
        RuntimeFailure: this process belongs to no job.
    """
    global _clients
    manager = _manager()
    with _lock:
        if _clients is None or _clients[0] is not manager:
            _clients = (manager, ChannelClients(manager.endpoint, manager.me, ChannelResolver(manager)))
        return _clients[1]


def create(name: str, maxsize: int, node: Node | WorkerAddress | int) -> ChannelClient:
    """Return a client of a new channel on a node, on that of a worker (which may still be launching), or on the node of
    a rank.

    Raises:
        InvalidNameError: the name is invalid or taken.
        ClusterError: the node does not exist, or the process does not start.
        ValueError: `node` is not a valid rank.
        RuntimeFailure: there is no such worker.
    """
    check_name(name, "channel")
    manager, session = _manager(), current_session()
    if session is None:
        raise _no_job()
    if not isinstance(node, Node):
        node = _node_of_rank(_rank_of(node) if isinstance(node, WorkerAddress) else node)
    seconds = contact_seconds()
    incarnation = manager.open_group(name, 1, seconds, channel=True)
    try:
        args = (replace(session, member=None), manager.info, name, maxsize, incarnation, node.ip, node.rank)
        _launch(session.job, name, node, args, seconds)
        client = clients().client(name)
        client.connect()
    except BaseException:
        # No caller gets the channel: free its name.
        manager.close_group(name, incarnation)
        raise
    return client


def _launch(job: str, name: str, node: Node, args: Sequence[Any], seconds: float) -> None:
    ray = ray_api()
    options = {
        "name": f"{name}:0",
        "namespace": job,
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
    }
    try:
        owner = ray.get_actor(MANAGER, namespace=job)
        (ready,) = ray.get(owner.run.remote(_start, options, args), timeout=seconds)
        ray.get(ready, timeout=seconds)
    except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
        cause = getattr(error, "cause", None) or error
        raise ClusterError(
            f"the process of channel `{name}` did not start",
            where=f"node {node.rank} ({node.ip})",
            why=(str(cause).strip().splitlines() or [type(cause).__name__])[-1],
        ) from None


def own_node(rank: int, ip: str) -> Node:
    return Node(ray_api().get_runtime_context().get_node_id(), ip, rank)


def _rank_of(worker: WorkerAddress) -> int:
    """Return the rank of the node that a worker lives on, waiting while it may still be launching.

    Raises:
        UnknownGroupError: the worker's group does not exist.
        PeerNotFoundError: the worker was not launched in time, or its group has no such rank.
    """
    manager = _manager()
    seconds = contact_seconds()
    manager.lookup(worker, seconds)
    name = worker.get_name()
    hello = manager.snapshot(seconds=seconds).peers.get(name)
    rank = None if hello is None else hello.node_rank
    if rank is None:
        raise PeerNotFoundError(name, f"the node of `{name}` is not known", help="give `node_id`")
    return rank


def _start(options: dict[str, Any], args: Sequence[Any]) -> Any:
    """Start a channel's process; runs in the manager. Return a list of the reference that resolves when it is ready."""
    actor = ray_api().remote(ChannelProcess).options(**options).remote(*args)
    _started.append(actor)
    return [actor.ready.remote()]


def _node_of_rank(node_rank: int) -> Node:
    rank = as_index(node_rank)
    if rank is None:
        raise ValueError(f"{short_repr(node_rank)} is not the rank of a node: ranks are integers >= 0")
    cluster = Cluster()
    ip = cluster.get_node_ip(rank)
    return Node(next(ray_id for ray_id, known_rank in cluster.node_ranks.items() if known_rank == rank), ip, rank)


def _manager() -> ManagerClient:
    manager = current_client()
    if manager is None:
        if current_session() is None:
            raise _no_job()
        manager = Cluster().client
    return manager


def _no_job() -> RuntimeFailure:
    return RuntimeFailure("this process belongs to no job", help="make a `Cluster` first")


_SPIN_SECONDS = 50e-6
_MAINTENANCE_SECONDS = 1.0
# The time limit for sending the closed notices.
_LINGER_SECONDS = 5.0


class ChannelProcess:
    """The process of a channel. Ray creates and ends it, but carries none of its messages.

    It ends with the job, or when the channel is closed and drained. `ip` is its address for other nodes.
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
        stacks.register()
        me = WorkerAddress(name).get_child_address(0)
        # It does nothing but pass messages on.
        settings = replace(Settings.from_environment(), reader_spin=_SPIN_SECONDS)
        self._client = ManagerClient(session, manager, me, ip=advertised_on(ip), settings=settings)
        self._broker = broker = Broker(name, self._client.endpoint, maxsize)
        self._client.channels = lambda: {name: broker.view()}
        self._client.announce(incarnation, f"node {node_rank} ({ip})", node_rank)
        threading.Thread(target=self._run_maintenance, name="rlinf-maintenance", daemon=True).start()

    def __repr__(self) -> str:
        """Return the prefix that Ray gives to each line that this process prints."""
        return f"channel {self._name}"

    def ready(self) -> None:
        """Return; the reply tells the caller that the channel is ready."""

    def _run_maintenance(self) -> None:
        pause = threading.Event()
        while not pause.wait(_MAINTENANCE_SECONDS):
            self._broker.run_maintenance()
            if self._broker.announce_end():
                self._end()
                return

    def _end(self) -> None:
        self._client.tell_exit_reason(CLOSED)
        self._client.close(linger=_LINGER_SECONDS)
        ray = ray_api()
        # Killed, as if by its owner: Ray would report a voluntary exit to the user as a failure.
        ray.kill(ray.get_runtime_context().current_actor)
