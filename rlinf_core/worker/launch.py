"""The launch of a group: its plan, and the start and construction of its workers on their nodes."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.driver_job import claim, claim_names, give_back
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.context import WorkerContext, current_session
from rlinf_core.errors import CommunicationTimeoutError, PlacementError, RLinfError, RuntimeFailure, WorkerDiedError
from rlinf_core.placement.component import mapped_strategy
from rlinf_core.placement.strategies import default_strategy
from rlinf_core.placement.strategy import Placement, PlacementStrategy, topology_of
from rlinf_core.process.import_path import user_folders, working_folder
from rlinf_core.suggest import as_index, short_repr
from rlinf_core.supervision.client import current_client
from rlinf_core.supervision.lives import GroupLife
from rlinf_core.waiting import Deadline
from rlinf_core.worker.calls import GroupMember, unanswered
from rlinf_core.worker.communication import Communication
from rlinf_core.worker.group_view import pickling
from rlinf_core.worker.handle import WorkerGroupHandle
from rlinf_core.worker.process import WorkerProcess
from rlinf_core.worker.process_host import CONCURRENCY, HostedActor, HostHandle, ProcessHost

# Positional and keyword arguments of a constructor.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# The most concurrent process starts per node: each imports Ray, which takes a core for a second, and 100 MiB meanwhile.
WAVE = 16
# Seconds between two checks whether a name is free: it takes Ray about 10 ms.
_NAME_SECONDS = 0.005


class LaunchPlan:
    """The checked arguments of `WorkerGroup.launch`, kept to launch single ranks again.

    Attributes:
        base: the prefix of the workers' addresses.
        placements: the places of the workers, by rank.
        pickled: the class and the arguments of its constructor.
        modules: the modules that forked processes share (see `Worker.forked`); empty if each process is an actor.
        use: the use of the group's devices, see `claiming.claim`.

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
        name: str | None = None,
        isolate_accelerator: bool = True,
        max_concurrency: int | None = None,
    ) -> None:
        several = as_index(max_concurrency)
        if max_concurrency is not None and (several or 0) < 1:
            raise ValueError(f"`max_concurrency` is {short_repr(max_concurrency)}, expected an integer >= 1")
        self.base = base_address(worker_class, arguments, name)
        if not isinstance(cluster, Cluster):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise PlacementError(f"{short_repr(cluster)} is not a `Cluster`", where=f"launch of `{self.base}`")
        self.use = object()
        self.cluster, self.max_concurrency = cluster, several
        if strategy is None:
            strategy = default_strategy(topology_of(cluster))
        elif isinstance(strategy, str | Mapping):
            strategy = mapped_strategy(str(self.base), strategy)
        elif isinstance(strategy, type) or not hasattr(strategy, "get_placement"):
            raise PlacementError(
                f"{short_repr(strategy)} is not a placement of processes",
                where=f"launch of `{self.base}`",
                help="give a strategy, or an entry as under `cluster.component_placement`, such as `0:0-3`",
            )
        self.placements = strategy.get_placement(cluster, isolate_accelerator)
        with pickling(f"`{worker_class.__name__}` or an argument of its constructor"):
            self.pickled: bytes = ray_api().cloudpickle.dumps((worker_class, *arguments))
        # With the modules of its bases: for a class in the driver's script, only these can be imported once.
        kinds = getattr(worker_class, "__mro__", (worker_class,)) if worker_class.forked else ()
        self.modules = tuple(dict.fromkeys(kind.__module__ for kind in kinds))


class Launch:
    """The launch of a group's workers, in steps that several groups can take together.

    Concurrent starts per node are limited. The group's devices are claimed for the use of the plan; a failed launch
    gives them back.

    Args:
        again: the rank of the only worker to launch, in place of one that has died or was killed; None for all.

    Raises:
        RuntimeFailure: a group of this name is already running.
    """

    def __init__(self, plan: LaunchPlan, again: int | None = None) -> None:
        self._plan, self._again = plan, again
        self._placements = [placement for placement in plan.placements if again in (None, placement.rank)]
        self._incarnation: int | None = None
        self._members: list[GroupMember] = []
        # Ray's names of the actors that forward the calls of forked workers, by rank.
        self._hosts: dict[int, str] = {}
        try:
            claim(plan.cluster, self._placements, plan.use)
            self._actors = self._allocate()
        except BaseException:
            self._give_back()
            raise

    def construct(self) -> WorkerGroupHandle[int]:
        """Construct the worker in every process; return the handle, whose results are the pids.

        Raises:
            RuntimeFailure: a group of this name is already running.
        """
        plan, cluster, client = self._plan, self._plan.cluster, self._plan.cluster.client
        client.in_flight = unanswered.in_flight
        base, seconds = str(plan.base), env_vars.CONNECT_TIMEOUT.get()
        if self._again is None:
            incarnation = self._incarnation = client.open_group(base, len(self._actors), seconds)
        else:
            incarnation = client.reopen_worker(self._name(self._placements[0]), seconds)
        # Computed now rather than at the start: scripts and test runners extend their path while they run.
        session = replace(cluster.session, import_path=user_folders(), working_folder=working_folder())
        master_addr = cluster.get_node_ip(self._placements[0].cluster_node_rank)
        # A reference: Ray passes the port to the workers once rank 0 has found it, so there is no wait here.
        master_port = self._actors[0].find_port.remote()
        references: list[Any] = []
        for placement, actor in zip(self._placements, self._actors, strict=True):
            node = cluster.get_node_info(placement.cluster_node_rank)
            context = WorkerContext(
                address=plan.base.get_child_address(placement.rank),
                group_name=base,
                placement=placement,
                node_ip=cluster.get_node_ip(node.rank),
                master_addr=master_addr,
                hardware=tuple(
                    robot.config
                    for index, robot in enumerate(r for r in node.robots if r.type == placement.hardware_type)
                    if index in placement.local_hardware_ranks
                ),
                session=session,
                incarnation=incarnation,
                given=cluster.given_variables(node.rank, placement.node_group_label),
                host=self._hosts.get(placement.rank, ""),
                claims=claim_names(cluster.topology, placement),
            )
            references.append(actor.construct.remote(context, client.info, plan.pickled, master_port))
            place = f"node {node.rank} ({context.node_ip})"
            self._members.append(GroupMember(context.address, actor, place, incarnation))
        return WorkerGroupHandle[int](base, "__init__", len(self._actors), self._members, references)

    def members(self, pids: Sequence[int]) -> tuple[GroupMember, ...]:
        """Return the workers, by rank, from the results of `construct`."""
        return tuple(replace(member, pid=pid) for member, pid in zip(self._members, pids, strict=True))

    def abandon(self) -> None:
        """End the processes, and give their devices back."""
        if self._incarnation is not None:
            # Only if this launch opened the group: another group may have the name.
            close_group(str(self._plan.base), self._incarnation)
        kill(self._actors)
        self._give_back()

    def _give_back(self) -> None:
        # When one rank is launched again, the other ranks still use the devices.
        if self._again is None:
            give_back(self._plan.use)

    def _allocate(self) -> list[Any]:
        plan = self._plan
        places = [(placement.cluster_node_rank, placement.node_group_label) for placement in self._placements]
        plan.cluster.prepare(places)
        actors: dict[int, Any] = {}
        try:
            if plan.modules:
                actors |= self._host()
            started = 0
            for wave in waves([node for node, _ in places]):
                plan.cluster.announce_launch(str(plan.base), len(places), started)
                started += len(wave)
                placements = [self._placements[index] for index in wave]
                if not plan.modules:
                    actors |= {placement.rank: self._actor(placement) for placement in placements}
                if started < len(places):
                    # A host forks a process on its first call. If a process dies here, its construction reports that.
                    ready = [actors[placement.rank].find_port.remote() for placement in placements]
                    ray_api().wait(ready, num_returns=len(ready), timeout=env_vars.CONNECT_TIMEOUT.get())
        except BaseException as error:
            kill(actors.values())
            if not isinstance(error, ValueError) or isinstance(error, RLinfError):
                raise
            raise RuntimeFailure(
                f"a group named `{plan.base}` is running in this job",
                help="choose another `name`, or shut that group down",
            ) from None
        return [actors[placement.rank] for placement in self._placements]

    def _actor(self, placement: Placement) -> Any:
        name = self._name(placement)
        return self._plan.cluster.allocate(
            WorkerProcess,
            node_rank=placement.cluster_node_rank,
            node_group=placement.node_group_label,
            name=name,
            max_concurrency=self._plan.max_concurrency,
            args=(name,),
        )

    def _host(self) -> dict[int, HostedActor]:
        """Start a host actor in each place, which forks the workers there; return the workers by rank."""
        by_place = defaultdict[tuple[int, str], list[Placement]](list)
        for placement in self._placements:
            by_place[placement.cluster_node_rank, placement.node_group_label].append(placement)
        plan, hosted = self._plan, dict[int, HostedActor]()
        for (node, label), placements in by_place.items():
            # Named after its first worker, so that Ray refuses a second group of the same name. In a relaunch, the old
            # host may still run with other workers, so the new one needs another name.
            name = self._name(placements[0]) + (f"-{secrets.token_hex(4)}" if self._again is not None else "")
            actor = plan.cluster.allocate(
                ProcessHost,
                node_rank=node,
                node_group=label,
                name=name,
                max_concurrency=CONCURRENCY,
                args=(name, plan.modules, plan.max_concurrency, user_folders(), working_folder()),
            )
            host = HostHandle(actor, map(self._name, placements))
            for placement in placements:
                hosted[placement.rank] = HostedActor(host, self._name(placement))
                self._hosts[placement.rank] = name
        return hosted

    def _name(self, placement: Placement) -> str:
        return str(self._plan.base.get_child_address(placement.rank))


def base_address(worker_class: type[Communication], arguments: Arguments, name: str | None) -> WorkerAddress:
    """Return the prefix of the workers' addresses: a name, else the address of the launching worker, if any."""
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
        if name is not None:
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
    """Return start waves of process indices, each with at most `WAVE` processes on every node.

    `nodes` holds the rank of each process's node.
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
    """Kill an actor, and wait until its name is free in Ray or, for a forked process, until it has ended.

    Raises:
        CommunicationTimeoutError: that takes longer than `RLINF_CONNECT_TIMEOUT`.
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
