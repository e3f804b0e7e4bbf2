"""The launch of channels: the job's manager starts their processes, so that they outlive their creator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf_core.address import WorkerAddress
from rlinf_core.channel import wire
from rlinf_core.channel.arguments import check_channel_name
from rlinf_core.channel.broker import Broker
from rlinf_core.channel.client import ChannelClient
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import EndpointInfo, Resolver, advertised_on
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_message import ReceivedMessage
from rlinf_core.context import Session, current_session
from rlinf_core.errors import ChannelError, ClusterError, PeerNotFoundError, RuntimeFailure, UnknownGroupError
from rlinf_core.node import stacks
from rlinf_core.suggest import as_index, short_repr
from rlinf_core.supervision.client import ManagerClient, current_client
from rlinf_core.supervision.lives import CLOSED, MANAGER
from rlinf_core.waiting import Deadline, contact_seconds


class ChannelClients:
    """The clients of all channels of one process.

    Args:
        me: the address of the worker that this process is, or of the driver.
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
# Actors that this process, the manager, has started: Ray ends an actor when its last handle is gone.
_started: list[Any] = []


@dataclass(frozen=True, slots=True)
class Node:
    """A node on which a channel can live: its id with Ray, in hex, its address for other nodes, its rank."""

    ray_id: str
    ip: str
    rank: int


class ChannelResolver(Resolver):
    """The resolver of channels' processes. Workers are refused, since they would not answer."""

    def __init__(self, manager: ManagerClient) -> None:
        self._manager = manager

    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        deadline = Deadline.after(max(0.0, timeout))
        is_known = self._is_known(address.root_group_name, deadline)
        info = self._manager.lookup(address, deadline.remaining())
        if not is_known:
            self._is_known(address.root_group_name, deadline)
        return info

    def _is_known(self, name: str, deadline: Deadline) -> bool:
        """Return whether there is a channel of this name by now.

        Raises:
            ChannelError: there is a group of workers of this name.
        """
        try:
            life = self._manager.group_life(name, deadline.remaining())
        except UnknownGroupError:
            return False
        if not life.channel:
            raise ChannelError(
                name,
                f"`{name}` is a worker group, not a channel",
                help="connect to the name that the channel was created with",
            )
        return True


def no_channel(name: str, error: UnknownGroupError | PeerNotFoundError) -> UnknownGroupError | PeerNotFoundError:
    """Return the error for a name that no channel has, which names the channels that exist."""
    try:
        job = _manager().snapshot()
    except RuntimeFailure:
        return error
    if f"{name}:0" in job.workers:
        # It exists, and cannot be reached.
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
    """Return the channels that this process uses.

    Raises:
        RuntimeFailure: it belongs to no job.
    """
    global _clients
    manager = _manager()
    with _lock:
        if _clients is None or _clients[0] is not manager:
            _clients = (manager, ChannelClients(manager.endpoint, manager.me, ChannelResolver(manager)))
        return _clients[1]


def create(name: str, maxsize: int, node: Node | int) -> ChannelClient:
    """Return a new channel on a node, or on that of a rank.

    Raises:
        InvalidNameError: the name is invalid or taken.
        ClusterError: the node does not exist, or the process does not start.
        ValueError: `node` is not a valid rank.
    """
    check_channel_name(name)
    manager, session = _manager(), current_session()
    if session is None:
        raise _no_job()
    if not isinstance(node, Node):
        node = _node_of_rank(node)
    seconds = contact_seconds()
    incarnation = manager.open_group(name, 1, seconds, channel=True)
    try:
        args = (replace(session, member=None), manager.info, name, maxsize, incarnation, node.ip, node.rank)
        _launch(session.job, name, node, args, seconds)
        client = clients().client(name)
        client.connect()
    except BaseException:
        # Nobody has it: its name becomes free again.
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


def rank_of(worker: WorkerAddress) -> int:
    """Return the rank of the node that a worker lives on, waiting while it may still be launching.

    Raises:
        UnknownGroupError: no such group.
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
    """Start a channel's process, in the manager's; return a reference to its being ready, in a list."""
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


# How often maintenance runs.
_MAINTENANCE_SECONDS = 1.0
# How long the closed notices may take to be sent.
_LINGER_SECONDS = 5.0


class ChannelProcess:
    """The process of a channel. Ray creates and ends it, and carries none of its messages.

    It ends with the job, or before when the channel is closed and drained. `ip` is its address for other nodes.
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
        self._client = ManagerClient(session, manager, me, ip=advertised_on(ip))
        self._broker = broker = Broker(name, self._client.endpoint, maxsize)
        self._client.channels = lambda: {name: broker.view()}
        self._client.announce(incarnation, f"node {node_rank} ({ip})", node_rank)
        threading.Thread(target=self._run_maintenance, name="rlinf-maintenance", daemon=True).start()

    def __repr__(self) -> str:
        """Return the prefix that Ray gives to each line that this process prints."""
        return f"channel {self._name}"

    def ready(self) -> None:
        """Answer once the channel is there."""

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
        # Killed, as by its owner: an exit by itself would be reported to the user as a failure.
        ray.kill(ray.get_runtime_context().current_actor)
