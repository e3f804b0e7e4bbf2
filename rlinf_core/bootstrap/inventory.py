"""From the `cluster` section to the machines it means: who each node is, how it is reached, what is started there.

Pure: nothing here touches a machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rlinf_core.config.cluster import ClusterConfig, DeclaredAccelerators, SshConfig
from rlinf_core.config.ranks import format_ranks
from rlinf_core.env_vars import NODE_RANK
from rlinf_core.errors import ConfigError
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.placement.environment import PATH_LISTS, NodeEnvironment, node_environment

RANK_LABEL: Final = "rlinf.io/rank"
GROUP_LABEL: Final = "rlinf.io/group"
# Tells a driver that the node's Ray was started with the variables of its file, and so needs them only once.
ENV_LABEL: Final = "rlinf.io/env"
# What Ray takes as the value of a label.
_LABEL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.\-]{0,61}[A-Za-z0-9])?\Z")
# Ray needs a port for each worker process besides those of its own, and starts as many as it sees cores.
_FEWEST_PORTS: Final = 100
_FIXED_PORTS: Final = 16
_CONNECT_SECONDS: Final = 10.0


class NodePorts(NamedTuple):
    """The TCP ports that Ray listens on at a node; the same on every one.

    Attributes:
        gcs: where the head is joined; only the head listens on it.
        dashboard: of the head, on loopback.
        first_worker, last_worker: what worker processes take theirs from.
    """

    gcs: int
    node_manager: int
    object_manager: int
    agent_listen: int
    agent_grpc: int
    runtime_env_agent: int
    metrics_export: int
    dashboard: int
    client_server: int
    first_worker: int
    last_worker: int

    @classmethod
    def of(cls, ports: range) -> NodePorts:
        """Return the layout within a range.

        Raises:
            ConfigError: the range is too short.
        """
        if len(ports) < _FEWEST_PORTS:
            raise ConfigError(
                f"`cluster.ports` holds {len(ports)} ports, Ray needs {_FEWEST_PORTS}",
                why="every worker process of Ray listens on one",
                help=f"write a longer range, as in `{ports.start}-{ports.start + 999}`",
            )
        first = ports.start
        return cls(
            gcs=first,
            node_manager=first + 1,
            object_manager=first + 2,
            agent_listen=first + 3,
            agent_grpc=first + 4,
            runtime_env_agent=first + 5,
            metrics_export=first + 6,
            dashboard=first + 7,
            client_server=first + 8,
            first_worker=first + _FIXED_PORTS,
            last_worker=ports.stop - 1,
        )

    def fixed(self, *, head: bool) -> dict[str, int]:
        """Return the ports that one process each listens on at a node, by what listens there."""
        only_head = {"gcs", "dashboard", "client_server"}
        names = self._fields[:9]
        return {name: getattr(self, name) for name in names if head or name not in only_head}


@dataclass(frozen=True, slots=True)
class NodeTarget:
    """One machine that is to be a node.

    Attributes:
        rank: its rank in the cluster; 0 is the head.
        host: where ssh reaches it, or None for this machine itself.
        groups: the labels of the node groups that it is in, in the order of the file.
        ssh: how it is reached; empty for this machine.
        interpreter: absolute path of the Python that runs Ray there.
        declared_interpreter: whether the file names it; else it is the one that runs here.
        env: the variables that Ray is started with, `RLINF_NODE_RANK` among them.
        prepended: the names among them whose value goes before the node's own, such as PATH.
        ports: what Ray listens on.
        accelerators: what its group declares, or None.
        robots: what its groups declare, as (hardware type, unit).
        env_digest: of the variables that its groups give it; empty when that is not known.
    """

    rank: int
    host: str | None
    groups: tuple[str, ...]
    ssh: SshConfig
    interpreter: str
    declared_interpreter: bool
    env: Mapping[str, str]
    prepended: tuple[str, ...]
    ports: NodePorts
    accelerators: DeclaredAccelerators | None = None
    robots: tuple[tuple[str, RobotUnit], ...] = ()
    env_digest: str = ""

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    @property
    def name(self) -> str:
        """`node 3 (trainer03)`, for messages."""
        return f"node {self.rank} ({self.host or 'this machine'})"

    @property
    def connect_seconds(self) -> float:
        """That reaching it may take; none for this machine."""
        return (self.ssh.connect_timeout or _CONNECT_SECONDS) if self.host is not None else 0.0

    @property
    def labels(self) -> dict[str, str]:
        """Ray's labels of the node; a name that Ray does not take as a label's value is stood for by its digest."""
        labels = {RANK_LABEL: str(self.rank)}
        if self.env_digest:
            labels[ENV_LABEL] = self.env_digest
        if self.groups:
            group = self.groups[0]
            labels[GROUP_LABEL] = group if _LABEL.match(group) else f"g-{_digest(group)}"
        return labels

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be the same for a running node to be this one: plain data, without the values of
        variables.
        """
        return {
            "rank": self.rank,
            "groups": list(self.groups),
            "interpreter": self.interpreter,
            "ports": f"{self.ports.gcs}-{self.ports.last_worker}",
            "env_vars": {name: _digest(value) for name, value in sorted(self.env.items())},
        }


def targets(
    cluster: ClusterConfig,
    *,
    environ: Mapping[str, str] | None = None,
    default_interpreter: str | None = None,
) -> tuple[NodeTarget, ...]:
    """Return the machines that a checked `cluster` section means, by rank.

    Args:
        cluster: the section.
        environ: where the variables of `forward_env` are taken from; default this process's own.
        default_interpreter: the Python of nodes that declare none; default the path of the one that runs this.

    Raises:
        ConfigError: some nodes have a host and others none, the ports are too few, or a variable that is to be
            forwarded is not set.
    """
    environ = os.environ if environ is None else environ
    interpreter = default_interpreter or sys.executable
    ports = NodePorts.of(cluster.ports)
    forwarded = _forwarded(cluster, environ)
    hosts = host_by_rank(cluster)
    return tuple(
        _target(cluster, rank, hosts.get(rank), forwarded, interpreter, ports) for rank in range(cluster.num_nodes)
    )


def host_by_rank(cluster: ClusterConfig) -> dict[int, str]:
    """Return the ssh destination of each node; empty when the file gives none.

    Raises:
        ConfigError: some nodes have one and others don't.
    """
    hosts: dict[int, str] = {}
    if cluster.hosts:
        hosts.update(enumerate(cluster.hosts))
    for group in cluster.node_groups:
        if group.hosts:
            for rank, host in zip(group.node_ranks.resolve(cluster.num_nodes), group.hosts, strict=False):
                hosts.setdefault(rank, host)
    missing = [rank for rank in range(cluster.num_nodes) if rank not in hosts]
    if hosts and missing:
        many = len(missing) > 1
        raise ConfigError(
            f"node{'s' if many else ''} {format_ranks(missing)} {'have' if many else 'has'} no host, others have one",
            help="put the others into a group with `hosts`, in rank order",
        )
    return hosts


def _forwarded(cluster: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    unset = [name for name in cluster.forward_env if name not in environ]
    if unset:
        listed = ", ".join(f"`{name}`" for name in unset)
        raise ConfigError(
            f"`cluster.forward_env` names {listed}, which {'is' if len(unset) == 1 else 'are'} not set here",
            help="set it before this command, or take it out of the file",
        )
    return {name: environ[name] for name in cluster.forward_env}


def _target(
    cluster: ClusterConfig,
    rank: int,
    host: str | None,
    forwarded: Mapping[str, str],
    interpreter: str,
    ports: NodePorts,
) -> NodeTarget:
    members = [group for group in cluster.node_groups if rank in group.node_ranks]
    ssh = cluster.ssh
    for group in reversed(members):
        ssh = group.ssh.over(ssh) if group.ssh else ssh
    environment = node_environment(cluster, rank)
    env = {**forwarded, **{each.name: each.value for each in environment.variables}, NODE_RANK.name: str(rank)}
    return NodeTarget(
        rank=rank,
        host=host,
        groups=tuple(group.label for group in members),
        ssh=ssh,
        interpreter=environment.interpreter or interpreter,
        declared_interpreter=environment.interpreter is not None,
        env=env,
        prepended=tuple(name for name in env if name in PATH_LISTS),
        ports=ports,
        accelerators=next((group.accelerators for group in members if group.accelerators), None),
        robots=tuple(
            (group.hardware.type, unit)
            for group in members
            if group.hardware
            for unit in group.hardware.configs
            if unit.node_rank == rank
        ),
        env_digest=environment_digest(environment),
    )


def environment_digest(environment: NodeEnvironment) -> str:
    """Return a short name of what node groups give to a node, which tells nothing of it."""
    return _digest(repr(sorted((each.name, each.value) for each in environment.variables)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
