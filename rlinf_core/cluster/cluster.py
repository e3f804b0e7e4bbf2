"""The cluster: the machines of a job, as one object."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rlinf_core import env_vars
from rlinf_core.cluster import driver_job, engine
from rlinf_core.cluster.joining import ProcessCommand, answer, has_returned, join, prepare
from rlinf_core.cluster.membership import NodeChange, NodeMember, check_hardware, stand_in
from rlinf_core.cluster.ray_api import no_cluster, ray_api
from rlinf_core.collective.endpoint_info import advertised_address
from rlinf_core.config.sections.cluster import CLUSTER_LABEL, ClusterConfig
from rlinf_core.context import Session, current_session, enter_session
from rlinf_core.errors import ClusterError, ConfigError
from rlinf_core.failures import raise_unseen
from rlinf_core.node import attach
from rlinf_core.node.environment import process_environment
from rlinf_core.node.own_process import name_user
from rlinf_core.placement.strategy import Placement
from rlinf_core.process import activity, pacing
from rlinf_core.process.known_secrets import known
from rlinf_core.suggest import as_index, short_repr
from rlinf_core.supervision.client import ManagerClient
from rlinf_core.topology import ClusterTopology, NodeGroupInfo, NodeInfo

_log = logging.getLogger("rlinf")
T = TypeVar("T")


class Cluster:
    """The nodes that a job runs on.

    `Cluster()` and `Cluster(num_nodes=1)` start an embedded Ray on this machine unless a cluster of `rlinf up` with
    that many nodes runs here. For more nodes, or if an address is known, they only join a cluster. Within a worker it
    is the worker's own cluster.

    Args:
        num_nodes: the number of nodes that the job needs; by default that of the configuration, else all nodes.
        cluster_cfg: the `cluster` section (a `ClusterConfig`, or anything with one as `.cluster`); node groups, robots
            and the environment of the nodes come from it.
        address: the head to join, `HOST:PORT`, or `local` to force an embedded Ray; by default `RLINF_ADDRESS`, else
            the cluster of `rlinf up` that `RLINF_CLUSTER` names or that this machine belongs to.

    Raises:
        ClusterError: no cluster can be joined, or nodes are still missing at `RLINF_CONNECT_TIMEOUT`.
        PlacementError: the nodes do not match the configuration.
        EnvironmentVariableError: a variable of `env_vars` is invalid.
    """

    def __init__(self, num_nodes: int | None = None, *, cluster_cfg: Any = None, address: str | None = None) -> None:
        self.config = _cluster_config(cluster_cfg)
        wanted = num_nodes if num_nodes is not None else (self.config.num_nodes if self.config else None)
        if wanted is not None and (as_index(wanted) or 0) < 1:
            raise ClusterError(f"a cluster of {short_repr(wanted)} nodes was requested", help="give an integer >= 1")
        if self.config and num_nodes is not None and num_nodes != self.config.num_nodes:
            raise ClusterError(
                f"`num_nodes` is {num_nodes}, but the configuration has {self.config.num_nodes}",
                help="remove one of them",
            )
        _check_environment()
        if home := name_user():
            _log.warning("HOME is not set, and user %d has no name: `%s` is used as its home folder", os.getuid(), home)
        self.session = current_session() or Session(f"rlinf-{secrets.token_hex(6)}", secrets.token_bytes(32))
        self._engine = engine.connect(
            # A worker stays in its own cluster.
            str(address) if address and self.session.member is None else None,
            self.session.job,
            may_start=attach.may_be_embedded(wanted, self.config),
            num_nodes=wanted,
        )
        if self._engine.embedded and self.session.folder is None:
            self.session = replace(self.session, folder=str(self._engine.folder))
        seats = join(self._engine, self.session, self.config, wanted, self.run_on)
        self._seats, self._members = seats, seats.members
        nodes = [member.info(rank) for rank, member in enumerate(self._members)]
        if self.config is not None:
            for rank in seats.absent:
                nodes[rank] = stand_in(self.config, rank, nodes, seats.absent)
        self.topology = ClusterTopology.from_nodes(nodes, self.config, lost=seats.absent)
        if self.config is not None and self.config.survives_losses:
            check_hardware(self.config, seats, nodes)
            self.session = replace(self.session, nodes=tuple(member.ray_id for member in self._members))
        # By node and command: the command line that Ray runs in place of its own Python.
        self._prepared: dict[tuple[int, ProcessCommand], str] = {}
        self._on_launch: Callable[[str, int, int], None] | None = None
        self._on_wait: Callable[[str, bool, str], None] | None = None
        enter_session(self.session)
        if self.session.member is None:
            driver = self._members[self.driver_rank]
            driver_job.start_manager(self.session, driver.ip, _on(driver))

    def __repr__(self) -> str:
        if engine.current() is not self._engine:
            return "<Cluster: shut down>"
        return f"<Cluster: {self.topology.counts}>"

    @property
    def client(self) -> ManagerClient:
        """This process's connection to the manager of its job.

        Raises:
            ClusterError: the manager does not start, or the cluster was shut down.
        """
        self._check_open()
        rank = self.driver_rank
        ip = self.get_node_ip(rank)
        return driver_job.connect_driver(self.session, ip, f"node {rank} ({ip})", rank)

    def record(
        self,
        log_folder: Path | None,
        *,
        log_names: Mapping[str, str] | None = None,
        trace: bool = False,
        on_launch: Callable[[str, int, int], None] | None = None,
        on_wait: Callable[[str, bool, str], None] | None = None,
    ) -> None:
        """Set up logs and traces for workers of groups launched from now on.

        Args:
            log_folder: the folder on each worker's node for its log, `GROUP/rank_N.log`; None for no logs.
            log_names: the folder names by group name.
            trace: whether workers record spans; `WorkerGroup.take_spans` collects them.
            on_launch: called with a group's name, its number of workers, and how many of them have been started.
            on_wait: called while another job holds devices, with the arguments of `announce_wait`; by default the start
                of each wait is logged.

        Raises:
            ClusterError: the cluster was shut down.
        """
        self._check_open()
        self._on_launch, self._on_wait = on_launch, on_wait
        folder = None if log_folder is None else str(log_folder.absolute())
        # This process is a part of the run, too.
        (activity.start if trace else activity.stop)()
        names = dict(log_names or {})
        session = replace(self.session, log_folder=folder, log_names=names, trace=trace, pacing=pacing.wanted)
        self.session = replace(session, secrets=known())
        enter_session(self.session)

    def claim(self, placements: Iterable[Placement]) -> None:
        """Claim the accelerators and robots of processes for this job, all or none, before they start.

        A launch claims the devices of its own group. A program with several groups should claim all devices first, so
        that it never waits for a device while it holds another.

        Args:
            placements: the places of the processes, as `PlacementStrategy.get_placement` returns them.

        Raises:
            DeviceHeldError: another job of this user holds one, and `RLINF_CLAIMS` says not to wait.
            ClusterError: a node does not answer.
        """
        self._check_open()
        driver_job.claim(self, placements)

    def announce_wait(self, what: str, *, again: bool = False, instead: str = "") -> None:
        """Report a wait of the job for devices, before it launches anything.

        Args:
            what: a description of the devices and their holders.
            again: whether it is an update about the same wait.
            instead: a description of what the user can do instead.
        """
        if self._on_wait is not None:
            self._on_wait(what, again, instead)
        elif not again:
            _log.warning("waiting for %s", "; ".join(filter(None, (what, instead))))

    def announce_launch(self, group: str, workers: int, started: int) -> None:
        if self._on_launch is not None:
            self._on_launch(group, workers, started)

    def declare_groups(self, *names: str) -> None:
        """Declare the worker groups that the job will have, without those that workers launch themselves.

        From then on a worker that sends to an undeclared group fails at once instead of waiting for its launch.
        Declaring again adds names.
        """
        self.client.declare(names)

    def _check_open(self) -> None:
        if engine.current() is not self._engine:
            raise no_cluster()

    @property
    def driver_rank(self) -> int:
        """The rank of this process's node; 0 if that is not a node of the job, for example a spare."""
        return self.own_rank or 0

    @property
    def own_rank(self) -> int | None:
        """The rank of this process's node; None if that is not a node of the job, for example a spare."""
        return self.node_ranks.get(ray_api().get_runtime_context().get_node_id())

    def run_on(self, member: NodeMember, function: Any, *args: Any) -> Any:
        """Run `function(*args)` on a node, in the environment of its Ray; return a reference to its result."""
        ray = ray_api()
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": _on(member)}
        return ray.remote(function).options(**options, **self._environment("")).remote(*args)

    def ask_nodes(self, function: Callable[[], T]) -> list[T]:
        """Return the result of `function` on each node, by rank.

        Raises:
            ClusterError: a node does not answer.
        """
        asked_at = time.time()
        pending = [(member, self.run_on(member, function)) for member in self._members]
        return [answer(reference, member, asked_at) for member, reference in pending]

    @property
    def num_nodes(self) -> int:
        """The number of nodes that processes are placed on; spares do not count."""
        return self.topology.num_nodes

    @property
    def changes(self) -> tuple[NodeChange, ...]:
        """The differences between the nodes of this cluster and those of the file."""
        return self._seats.changes

    def has_returned(self) -> bool:
        """Return whether a lost node, without which elastic components run, has joined again."""
        return bool(self._seats.absent) and has_returned(self._seats.absent)

    @property
    def num_accelerators(self) -> int:
        """The total number of accelerators."""
        return self.topology.num_accelerators or 0

    @cached_property
    def node_ranks(self) -> Mapping[str, int]:
        """The rank of each node, by Ray's id of the node."""
        return {member.ray_id: rank for rank, member in enumerate(self._members)}

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """Return the facts about node `node_rank`.

        Raises:
            ClusterError: there is no such node.
        """
        rank = as_index(node_rank)
        if rank is None or not 0 <= rank < self.num_nodes:
            raise ClusterError(
                f"there is no node {short_repr(node_rank)}", help=f"the nodes are 0 to {self.num_nodes - 1}"
            )
        return self.topology.nodes[node_rank]

    def get_node_ip(self, node_rank: int) -> str:
        """Return the address at which other nodes reach node `node_rank`.

        Raises:
            ClusterError: there is no such node.
        """
        return self.get_node_info(node_rank).ip or "127.0.0.1"

    def get_node_group(self, label: str = CLUSTER_LABEL) -> NodeGroupInfo:
        """Return the node group of this label; by default `cluster`, all nodes.

        Raises:
            PlacementError: it does not exist.
        """
        return self.topology.group(label)

    def allocate(
        self,
        actor_class: type,
        *,
        node_rank: int,
        node_group: str = CLUSTER_LABEL,
        name: str | None = None,
        max_concurrency: int | None = None,
        args: Iterable[Any] = (),
        outlives: bool = False,
    ) -> Any:
        """Start a Ray actor `actor_class(*args)` on a node, in the environment of a group there.

        Does not wait for its construction. The actor reserves no CPUs in Ray: placement has been decided already.

        Args:
            actor_class: an ordinary class.
            node_rank: the rank of the node.
            node_group: the label of the group whose `env_configs` apply; `cluster` and `node` have none.
            name: Ray's name of the actor, within the job.
            max_concurrency: the number of its methods that may run concurrently.
            args: the arguments of its constructor.
            outlives: whether it continues after this process has left the cluster; it must end itself.

        Raises:
            ClusterError: there is no such node, its interpreter cannot run workers, its variables are too large, or the
                cluster was shut down.
            ConfigError: a variable that `cluster.forward_env` names is not set.
        """
        self._check_open()
        ray = ray_api()
        self.get_node_info(node_rank)
        member = self._members[node_rank]
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": _on(member)}
        if name is not None:
            options |= {"name": name, "namespace": self.session.job}
        if outlives:
            # Ray requires a name for a detached actor.
            name = f"{actor_class.__name__}-{secrets.token_hex(6)}"
            options |= {"name": name, "namespace": self.session.job, "lifetime": "detached"}
        if max_concurrency is not None:
            options["max_concurrency"] = max_concurrency
        self.prepare([(node_rank, node_group)])
        command = self._command(node_rank, node_group)
        executable = self._prepared[node_rank, command] if command is not None else ""
        return ray.remote(actor_class).options(**options, **self._environment(executable)).remote(*args)

    def _environment(self, executable: str) -> dict[str, Any]:
        """Return Ray's options for the environment of a process; an empty `executable` means Ray's own Python there.

        Without the options, the process would inherit the environment of a launching worker.
        """
        # Ray inserts the value unquoted into a shell command, so it may be a whole command line.
        options: dict[str, Any] = {"runtime_env": {"py_executable": executable}}
        return options if executable or self.session.member is not None else {}

    def prepare(self, places: Iterable[tuple[int, str]]) -> None:
        """Write the environments of processes to their nodes and check their interpreters, on all nodes in parallel.

        Args:
            places: pairs of node rank and label of the group that places a process there.

        Raises:
            ClusterError: an interpreter cannot run workers, or a node does not answer.
            ConfigError: a variable that `cluster.forward_env` names is not set.
        """
        asked_at = time.time()
        waiting: dict[tuple[int, ProcessCommand], Any] = {}
        for rank, label in dict.fromkeys(places):
            command = self._command(rank, label)
            if command is not None and (rank, command) not in self._prepared:
                here = self._engine.embedded
                waiting[rank, command] = None if here else self.run_on(self._members[rank], prepare, command)
        for (rank, command), reference in waiting.items():
            member = self._members[rank]
            executable, fault = prepare(command) if reference is None else answer(reference, member, asked_at)
            if fault:
                raise ClusterError(
                    f"the interpreter `{command.interpreter}` cannot run workers",
                    where=f"node {rank} ({member.ip})",
                    why=fault,
                    help="`python_interpreter_path` must be a Python with the cluster's ray and this rlinf installed",
                )
            self._prepared[rank, command] = executable

    def given_variables(self, node_rank: int, node_group: str) -> frozenset[str]:
        """Return the names of the variables that the file sets for the processes of a group on a node."""
        command = self._command(node_rank, node_group)
        return frozenset(name for name, _ in command.variables) if command is not None else frozenset()

    def _command(self, node_rank: int, node_group: str) -> ProcessCommand | None:
        if self.config is None:
            return None
        # A spare has an environment of its own, for its own machine.
        environment = process_environment(self.config, self._seats.own_rank(node_rank), node_group)
        return ProcessCommand.of(environment.values(os.environ), environment.interpreter, f"node {node_rank}")

    def shutdown(self) -> None:
        """End the groups that this process launched, and leave the cluster; shut down an embedded Ray. Idempotent.

        A worker stays in its cluster: in a worker, only the groups that it launched end.

        Raises:
            WorkerGroupError: a call whose result was never read had failed.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self.session.member is not None:
            raise_unseen(engine.end_all(), instead_of=error)
            return
        unseen = engine.disconnect()
        enter_session(None)
        raise_unseen(unseen, instead_of=error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)


def _on(member: NodeMember) -> Any:
    return ray_api().util.scheduling_strategies.NodeAffinitySchedulingStrategy(member.ray_id, soft=False)


def _check_environment() -> None:
    """Validate the variables before Ray starts, rather than in the first process that reads them."""
    env_vars.check()
    if env_vars.NET_IF.get():
        # This machine must have the interface; other nodes read their own variables.
        advertised_address()
    if current_session() is None:
        _warn_of_unknown()


@cache  # once in a process
def _warn_of_unknown() -> None:
    for message in env_vars.unknown():
        _log.warning("%s", message)


def _cluster_config(cluster_cfg: Any) -> ClusterConfig | None:
    config = getattr(cluster_cfg, "cluster", cluster_cfg)
    if config is None or isinstance(config, ClusterConfig):
        return config
    raise ConfigError(
        f"`cluster_cfg` is a {type(cluster_cfg).__name__}, not a `ClusterConfig` or an object with one as `.cluster`",
        help="load the file with `rlinf_core.load_job`, and pass its `config`",
    )
