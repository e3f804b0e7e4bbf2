"""The launch of a group: its plan, and from its placements actors on their nodes, each constructed with its context."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster.claiming import claim, claim_names, give_back
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.context import WorkerContext, current_session
from rlinf_core.errors import CommunicationTimeoutError, RLinfError, RuntimeFailure, WorkerDiedError
from rlinf_core.placement.component import mapped_strategy
from rlinf_core.placement.strategies import default_strategy
from rlinf_core.placement.strategy import Placement, PlacementStrategy, topology_of
from rlinf_core.process.import_path import user_folders, working_folder
from rlinf_core.suggest import as_index, short_repr
from rlinf_core.supervision.client import current_client
from rlinf_core.supervision.lives import GroupLife
from rlinf_core.waiting import Deadline
from rlinf_core.worker.calls import unanswered, unpicklable
from rlinf_core.worker.communication import Communication
from rlinf_core.worker.group.group_view import NO_PICKLE
from rlinf_core.worker.group.handle import GroupMember, WorkerGroupHandle
from rlinf_core.worker.process import Birth, WorkerProcess
from rlinf_core.worker.process_host import CONCURRENCY, HostedActor, HostHandle, ProcessHost

# Positional and keyword arguments of a constructor.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# Concurrent process starts per node: each imports Ray, which takes a second of a core and 100 MiB meanwhile.
WAVE = 16
# Seconds between two looks whether a name is free: it takes Ray about 10 ms.
_NAME_SECONDS = 0.005


class Launch:
    """The launch of a group's workers, in steps that several groups can take together.

    Their addresses start with `base`; `pickled` is the class and the arguments of its constructor. With modules, the
    processes are forked (see `Worker.forked`). Starts per node are limited while processes import. Its devices are
    claimed for `use`, which ends with it unless it succeeds.

    Raises:
        RuntimeFailure: a group of this name is already running.
    """

    def __init__(
        self,
        cluster: Cluster,
        base: WorkerAddress,
        placements: list[Placement],
        pickled: bytes,
        max_concurrency: int | None = None,
        modules: tuple[str, ...] = (),
        *,
        use: object,
    ) -> None:
        self._use = use
        self._cluster, self._base, self._placements, self._pickled = cluster, base, placements, pickled
        self._incarnation: int | None = None
        # Ray's names of the actors that pass on the calls of forked workers, by rank.
        self._hosts: dict[int, str] = {}
        try:
            claim(cluster, placements, use)
            self._actors = self._allocate(max_concurrency, modules)
        except BaseException:
            self._give_back()
            raise

    def construct(self) -> WorkerGroupHandle[Birth]:
        """Construct the worker in every process; return the handle.

        Raises:
            RuntimeFailure: a group of this name is already running.
        """
        self._incarnation = self._register(env_vars.CONNECT_TIMEOUT.get())
        return self._construct(self._incarnation)

    def members(self, births: Sequence[Birth]) -> tuple[GroupMember, ...]:
        """Return the workers, by rank, from the results of `construct`."""
        incarnation = self._incarnation
        if incarnation is None:
            raise RuntimeError("members() was called before construct()")
        return tuple(
            GroupMember(
                self._base.get_child_address(placement.rank),
                actor,
                f"node {birth.node_rank} ({birth.node_ip})",
                incarnation,
                birth.pid,
            )
            for placement, actor, birth in zip(self._placements, self._actors, births, strict=True)
        )

    def abandon(self) -> None:
        if self._incarnation is not None:
            # Not before it was opened: another group may have the name.
            close_group(str(self._base), self._incarnation)
        kill(self._actors)
        self._give_back()

    def _give_back(self) -> None:
        give_back(self._use)

    def _register(self, seconds: float) -> int:
        """Register the launch with the job's manager; return its incarnation."""
        return self._cluster.client.open_group(str(self._base), len(self._actors), seconds)

    def _allocate(self, max_concurrency: int | None, modules: tuple[str, ...]) -> list[Any]:
        places = [(placement.cluster_node_rank, placement.node_group_label) for placement in self._placements]
        self._cluster.prepare(places)
        actors: dict[int, Any] = {}
        try:
            if modules:
                actors |= self._host(max_concurrency, modules)
            started = 0
            for wave in waves([node for node, _ in places]):
                self._cluster.announce_launch(str(self._base), len(places), started)
                started += len(wave)
                placements = [self._placements[index] for index in wave]
                if not modules:
                    actors |= {placement.rank: self._actor(placement, max_concurrency) for placement in placements}
                if started < len(places):
                    # A host forks a process at its first call. The death of a process is reported at its construction.
                    ready = [actors[placement.rank].find_port.remote() for placement in placements]
                    ray_api().wait(ready, num_returns=len(ready), timeout=env_vars.CONNECT_TIMEOUT.get())
        except ValueError as error:
            kill(actors.values())
            if isinstance(error, RLinfError):
                raise
            raise RuntimeFailure(
                f"a group named `{self._base}` is running in this job",
                help="choose another `name`, or shut that group down",
            ) from None
        except BaseException:
            kill(actors.values())
            raise
        return [actors[placement.rank] for placement in self._placements]

    def _actor(self, placement: Placement, max_concurrency: int | None) -> Any:
        name = self._name(placement)
        return self._cluster.allocate(
            WorkerProcess,
            node_rank=placement.cluster_node_rank,
            node_group=placement.node_group_label,
            name=name,
            max_concurrency=max_concurrency,
            args=(name,),
        )

    def _host(self, max_concurrency: int | None, modules: tuple[str, ...]) -> dict[int, HostedActor]:
        """Start an actor in each place, from which the workers there are forked; return the workers by rank."""
        by_place = defaultdict[tuple[int, str], list[Placement]](list)
        for placement in self._placements:
            by_place[placement.cluster_node_rank, placement.node_group_label].append(placement)
        hosted: dict[int, HostedActor] = {}
        for (node, label), placements in by_place.items():
            name = self._host_name(placements[0])
            actor = self._cluster.allocate(
                ProcessHost,
                node_rank=node,
                node_group=label,
                name=name,
                max_concurrency=CONCURRENCY,
                args=(name, modules, max_concurrency, user_folders(), working_folder()),
            )
            host = HostHandle(actor, map(self._name, placements))
            for placement in placements:
                hosted[placement.rank] = HostedActor(host, self._name(placement))
                self._hosts[placement.rank] = name
        return hosted

    def _name(self, placement: Placement) -> str:
        return str(self._base.get_child_address(placement.rank))

    def _host_name(self, first: Placement) -> str:
        """Return Ray's name of a host, by its first worker: two groups of one name are refused by Ray."""
        return self._name(first)

    def _construct(self, incarnation: int) -> WorkerGroupHandle[Birth]:
        cluster, client = self._cluster, self._cluster.client
        client.in_flight = unanswered.in_flight
        # Taken now rather than at the start: scripts and test runners extend their path while running.
        session = replace(cluster.session, import_path=user_folders(), working_folder=working_folder())
        master_addr = cluster.get_node_ip(self._placements[0].cluster_node_rank)
        # A reference: Ray passes the port to the others once rank 0 has found it, without waiting here.
        master_port = self._actors[0].find_port.remote()
        references: list[Any] = []
        members: list[GroupMember] = []
        for placement, actor in zip(self._placements, self._actors, strict=True):
            address = self._base.get_child_address(placement.rank)
            node = cluster.get_node_info(placement.cluster_node_rank)
            context = WorkerContext(
                address=address,
                group_name=str(self._base),
                placement=placement,
                node_ip=cluster.get_node_ip(placement.cluster_node_rank),
                master_addr=master_addr,
                hardware=tuple(
                    robot.config
                    for index, robot in enumerate(r for r in node.robots if r.type == placement.hardware_type)
                    if index in placement.local_hardware_ranks
                ),
                session=session,
                incarnation=incarnation,
                given=cluster.given_variables(placement.cluster_node_rank, placement.node_group_label),
                host=self._hosts.get(placement.rank, ""),
                claims=claim_names(cluster.topology, placement),
            )
            references.append(actor.construct.remote(context, client.info, self._pickled, master_port))
            members.append(
                GroupMember(address, actor, f"node {placement.cluster_node_rank} ({context.node_ip})", incarnation)
            )
        return WorkerGroupHandle[Birth](str(self._base), "__init__", len(self._actors), members, references)


class Relaunch(Launch):
    """The launch of one worker in place of one that has died, whose handle Ray was asked to end."""

    def abandon(self) -> None:
        """End the process."""
        kill(self._actors)

    def _give_back(self) -> None:
        """Leave the devices to the other ranks."""

    def _host_name(self, first: Placement) -> str:
        # The host of the one before may have others.
        return f"{self._name(first)}-{secrets.token_hex(4)}"

    def _register(self, seconds: float) -> int:
        (placement,) = self._placements
        return self._cluster.client.reopen_worker(str(self._base.get_child_address(placement.rank)), seconds)


class LaunchPlan:
    """The checked arguments of `WorkerGroup.launch`. It stays: single ranks are launched again by it.

    Attributes:
        base: the prefix of the workers' addresses.
        placements: the places of the workers, by rank.
        use: the use of the group's devices, as for `claiming.claim`.

    Raises:
        PlacementError: the cluster cannot hold the processes as asked.
        ValueError: `max_concurrency` is not an integer >= 1.
        PayloadError: the class or an argument does not pickle.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_class: type[Communication],
        arguments: Arguments,
        strategy: PlacementStrategy | str | Mapping[str, Any] | None,
        name: str | None,
        isolate_accelerator: bool,
        max_concurrency: int | None,
    ) -> None:
        if max_concurrency is not None and (as_index(max_concurrency) or 0) < 1:
            raise ValueError(f"`max_concurrency` is {short_repr(max_concurrency)}, expected an integer >= 1")
        self.base = base_address(worker_class, arguments, name)
        self.use = object()
        self._cluster, self._max_concurrency = cluster, max_concurrency
        if strategy is None:
            strategy = default_strategy(topology_of(cluster))
        elif isinstance(strategy, str | Mapping):
            strategy = mapped_strategy(str(self.base), strategy)
        self.placements = strategy.get_placement(cluster, isolate_accelerator)
        try:
            self._pickled: bytes = ray_api().cloudpickle.dumps((worker_class, *arguments))
        except NO_PICKLE as error:
            raise unpicklable(f"`{worker_class.__name__}` or an argument of its constructor", error) from None
        # Those of its bases as well: of a class in the driver's script they are all that can be imported once.
        kinds = getattr(worker_class, "__mro__", (worker_class,)) if worker_class.forked else ()
        self._modules = tuple(dict.fromkeys(kind.__module__ for kind in kinds))

    def begin(self) -> Launch:
        """Begin the launch of all ranks."""
        return self._launch(Launch, self.placements)

    def begin_again(self, rank: int) -> Launch:
        """Begin the launch of one rank in place of an earlier process."""
        (placement,) = (placement for placement in self.placements if placement.rank == rank)
        return self._launch(Relaunch, [placement])

    def _launch(self, kind: type[Launch], placements: list[Placement]) -> Launch:
        concurrency, modules = self._max_concurrency, self._modules
        return kind(self._cluster, self.base, placements, self._pickled, concurrency, modules, use=self.use)


def base_address(worker_class: type[Communication], arguments: Arguments, name: str | None) -> WorkerAddress:
    """Return the prefix of the workers' addresses: a name, else the launching worker, if any."""
    name = name if name is not None else _configured_name(worker_class, arguments)
    if name is not None:
        return WorkerAddress(name)
    session = current_session()
    if session is not None and session.member is not None:
        return session.member
    return WorkerAddress(f"Worker_group_{worker_class.__name__}")


def _configured_name(worker_class: type[Communication], arguments: Arguments) -> str | None:
    """Return `group_name` of the class's section, from the first argument that has such a section."""
    section = worker_class.config_section
    if section is None:
        return None
    args, kwargs = arguments
    for argument in (*args, *kwargs.values()):
        name = _entry(_entry(argument, section), "group_name")
        if isinstance(name, str):
            return name
    return None


def _entry(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return cast("Mapping[str, Any]", config).get(name)
    return getattr(config, name, None)


def running_members(base: WorkerAddress, life: GroupLife, job: str) -> tuple[GroupMember, ...]:
    """Return the workers of a running group, by rank; `base` is the prefix of their addresses.

    Raises:
        WorkerDiedError: one of them is dead.
    """
    members, hosts = list[GroupMember](), dict[str, HostHandle]()
    for rank, (node, incarnation, host) in enumerate(zip(life.nodes, life.workers, life.hosts, strict=True)):
        address = base.get_child_address(rank)
        try:
            actor = ray_api().get_actor(host or str(address), namespace=job)
        except ValueError:
            raise WorkerDiedError(str(address), node=node or None) from None
        if host:
            names = (str(base.get_child_address(n)) for n, other in enumerate(life.hosts) if other == host)
            actor = HostedActor(hosts.setdefault(host, HostHandle(actor, names)), str(address))
        members.append(GroupMember(address, actor, node, incarnation))
    return tuple(members)


def waves(nodes: Sequence[int]) -> list[list[int]]:
    """Return the indices of processes in start waves, each with at most `WAVE` on every node.

    `nodes` has the rank of each process's node.
    """
    waves, before = list[list[int]](), Counter[int]()
    for index, node in enumerate(nodes):
        wave = before[node] // WAVE
        before[node] += 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(index)
    return waves


def close_group(name: str, incarnation: int) -> None:
    client = current_client()
    if client is not None:
        client.close_group(name, incarnation)


def kill(actors: Iterable[Any]) -> None:
    ray = ray_api()
    for actor in actors:
        if isinstance(actor, HostedActor):
            actor.kill()
        else:
            ray.kill(actor)


def release_name(actor: Any, name: str, job: str) -> None:
    """Have Ray forget a dead actor, and return once its name is free, or once its forked process has ended.

    Raises:
        CommunicationTimeoutError: it is not within `RLINF_CONNECT_TIMEOUT`.
    """
    ray = ray_api()
    deadline = Deadline.after(env_vars.CONNECT_TIMEOUT.get())
    if isinstance(actor, HostedActor):
        ended, _ = ray.wait([actor.ended()], timeout=deadline.seconds)
        if not ended:
            raise CommunicationTimeoutError(f"waiting for the process of `{name}` to end", deadline.seconds)
        kill([actor])
        return
    kill([actor])
    while True:
        try:
            ray.get_actor(name, namespace=job)
        except ValueError:
            return
        if deadline.expired:
            raise CommunicationTimeoutError(f"waiting for Ray to release the name `{name}`", deadline.seconds)
        time.sleep(_NAME_SECONDS)
