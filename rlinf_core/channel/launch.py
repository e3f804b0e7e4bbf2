"""The launch of channels: the manager of the job starts their processes, so that they outlive who asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.arguments import as_index, short_repr
from rlinf_core.channel.arguments import check_channel_name
from rlinf_core.channel.client import ChannelClient
from rlinf_core.channel.clients import ChannelClients
from rlinf_core.channel.process import ChannelProcess
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.collective.resolver import Resolver
from rlinf_core.context import current_session
from rlinf_core.errors import ChannelError, ClusterError, PeerNotFoundError, RuntimeFailure, UnknownGroupError
from rlinf_core.manager.client import ManagerClient, current_client
from rlinf_core.manager.messages import MANAGER, CloseGroup, Inspect, JobPicture
from rlinf_core.waiting import Deadline

_lock = threading.Lock()
_clients: tuple[ManagerClient, ChannelClients] | None = None
# Actors that this process, the manager, has started: Ray ends them when their last handle is gone.
_started: list[Any] = []


@dataclass(frozen=True, slots=True)
class Node:
    """A node on which a channel can live.

    Attributes:
        ray_id: Ray's id of it, in hex.
        ip: the address under which other nodes reach it.
        rank: its rank in the cluster.
    """

    ray_id: str
    ip: str
    rank: int


class ChannelResolver(Resolver):
    """Finds the processes of channels, and none of workers: those would not answer."""

    def __init__(self, manager: ManagerClient) -> None:
        self._manager = manager

    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        deadline = Deadline.after(max(0.0, timeout))
        known = self._is_known(address.root_group_name, deadline)
        info = self._manager.lookup(address, deadline.remaining())
        if not known:
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
        InvalidNameError: the name cannot be one, or is taken.
        ClusterError: there is no such node, or the process does not start.
        ValueError: `node` is no rank.
    """
    check_channel_name(name)
    manager, session = _manager(), current_session()
    if session is None:
        raise _no_job()
    if not isinstance(node, Node):
        node = _node_of_rank(node)
    seconds = env_vars.CONNECT_TIMEOUT.get()
    incarnation = manager.open_group(name, 1, seconds, channel=True)
    try:
        args = (replace(session, member=None), manager.info, name, maxsize, incarnation, node.ip, node.rank)
        _launch(session.job, name, node, args, seconds)
        client = clients().client(name)
        client.connect()
    except BaseException:
        # Nobody has it, so that its name is to be free again.
        manager.tell(CloseGroup(name, incarnation))
        raise
    return client


def _launch(job: str, name: str, node: Node, args: Sequence[Any], seconds: float) -> None:
    """Start the process of a channel, and return when it is there."""
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
    """Return the node of this process, whose rank and address it knows."""
    return Node(ray_api().get_runtime_context().get_node_id(), ip, rank)


def rank_of(worker: WorkerAddress) -> int:
    """Return the rank of the node that a worker lives on, waiting while it may still be launching.

    Raises:
        UnknownGroupError: there is no such group.
        PeerNotFoundError: the worker was not launched in time, or its group has no such rank.
    """
    manager = _manager()
    seconds = env_vars.CONNECT_TIMEOUT.get()
    manager.lookup(worker, seconds)
    picture = cast("JobPicture", manager.request(Inspect(), seconds))
    name = worker.get_name()
    rank = next((one.node_rank for one in picture.workers if one.name == name), None)
    if rank is None:
        raise PeerNotFoundError(name, f"the node of `{name}` is not known", help="give `node_id`")
    return rank


def _start(options: dict[str, Any], args: Sequence[Any]) -> Any:
    """Start a channel's process, in the manager's; a reference to its being ready, as the only item of a list."""
    actor = ray_api().remote(ChannelProcess).options(**options).remote(*args)
    _started.append(actor)
    return [actor.ready.remote()]


def _node_of_rank(given: int) -> Node:
    rank = as_index(given)
    if rank is None:
        raise ValueError(f"{short_repr(given)} is not the rank of a node: ranks are whole numbers from 0")
    cluster = Cluster()
    ip = cluster.get_node_ip(rank)
    return Node(next(ray_id for ray_id, one in cluster.node_ranks.items() if one == rank), ip, rank)


def _manager() -> ManagerClient:
    manager = current_client()
    if manager is None:
        if current_session() is None:
            raise _no_job()
        manager = Cluster().client
    return manager


def _no_job() -> RuntimeFailure:
    return RuntimeFailure("this process belongs to no job", help="make a `Cluster` first")
