"""The machines of the `cluster` section, or of a recorded cluster: how to reach each, and what to start there."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from rlinf_cli.job.picture import hosts_by_rank
from rlinf_core import env_vars
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.sections.cluster import CLUSTER_LABEL, ClusterConfig, DeclaredAccelerators, NodeGroup, SshConfig
from rlinf_core.config.sections.cluster_values import expand_hosts
from rlinf_core.config.tree import NotationError
from rlinf_core.errors import ClusterError, ConfigError
from rlinf_core.hardware.robots import RobotUnit
from rlinf_core.node import cluster_records
from rlinf_core.node.attach import RANK_LABEL, NodePorts
from rlinf_core.node.cluster_records import ClusterRecord
from rlinf_core.node.environment import PATH_LISTS, process_environment, ray_interpreter

GROUP_LABEL: Final = "rlinf.io/group"
# A valid value of a Ray label.
_LABEL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.\-]{0,61}[A-Za-z0-9])?\Z")
_CONNECT_SECONDS: Final = 10.0


class GroupEnvironment(NamedTuple):
    """The environment of a group's processes on a node.

    Attributes:
        label: the label of the group; `cluster` for processes without a group's `env_configs`.
        interpreter: the absolute path of their Python.
        variables: the group's variables, without forwarded ones.
    """

    label: str
    interpreter: str
    variables: Mapping[str, str]
    has_robots: bool = False

    def request(self) -> dict[str, Any]:
        """Return the environment in the form that `node_env` reads."""
        names = [name for name in self.variables if name in PATH_LISTS]
        return {"interpreter": self.interpreter, "env": dict(self.variables), "prepended": names}


@dataclass(frozen=True, slots=True)
class NodeTarget:
    """A machine that is to be a node.

    Attributes:
        rank: its rank in the cluster; 0 is the head.
        host: its ssh destination, or None for this machine.
        groups: the labels of its node groups, in the order of the file.
        ssh: its ssh settings; empty for this machine.
        interpreter: absolute path of the Python that runs Ray there.
        declared_interpreter: whether the file names that path; else it is the path of this process's interpreter.
        accelerators: the accelerators that its group declares, or None.
        memory_gib: the least memory that its groups declare, or None.
        robots: the robots that its groups declare, as (hardware type, unit).
        forwarded: the names of the variables forwarded from the driver.
        environments: further environments, with their own interpreters, for processes there.
    """

    rank: int
    host: str | None
    groups: tuple[str, ...]
    ssh: SshConfig
    interpreter: str
    declared_interpreter: bool
    ports: NodePorts
    accelerators: DeclaredAccelerators | None = None
    memory_gib: float | None = None
    robots: tuple[tuple[str, RobotUnit], ...] = ()
    forwarded: tuple[str, ...] = ()
    environments: tuple[GroupEnvironment, ...] = ()

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    @property
    def name(self) -> str:
        """Its name in messages, as in `node 3 (trainer03)`."""
        return f"node {self.rank} ({self.host or 'this machine'})"

    @property
    def connect_seconds(self) -> float:
        """The time limit for connecting to it, in seconds; 0 for this machine."""
        return (self.ssh.connect_timeout or _CONNECT_SECONDS) if self.host is not None else 0.0

    @property
    def env(self) -> dict[str, str]:
        """The environment variables for Ray, without those of groups, which are for their processes only."""
        return {env_vars.NODE_RANK.name: str(self.rank), env_vars.PORTS.name: self.ports.data}

    @property
    def labels(self) -> dict[str, str]:
        """Ray's labels for the node; a digest replaces a group name that is not a valid label value."""
        labels = {RANK_LABEL: str(self.rank)}
        if self.groups:
            group = self.groups[0]
            labels[GROUP_LABEL] = (
                group if _LABEL.match(group) else f"g-{hashlib.sha256(group.encode()).hexdigest()[:12]}"
            )
        return labels

    def fingerprint(self) -> dict[str, Any]:
        """Return the plain data that must equal a running node's for it to match this one."""
        return {
            "rank": self.rank,
            "groups": list(self.groups),
            "interpreter": self.interpreter,
            "ports": self.ports.full_range,
        }


def targets(cluster: ClusterConfig) -> tuple[NodeTarget, ...]:
    """Return the machines of a validated `cluster` section, by rank.

    On nodes that declare no interpreter, it has the path of this process's.

    Raises:
        ConfigError: some nodes have a host and others none, or the ports are too few.
    """
    ports = NodePorts.of(cluster.ports)
    hosts = _hosts(cluster)
    return tuple(_target(cluster, rank, hosts.get(rank), ports) for rank in range(cluster.num_nodes))


def reachable(cluster: ClusterConfig) -> tuple[NodeTarget, ...]:
    """Return the machines of a cluster, by rank.

    Raises:
        ConfigError: the cluster has several nodes but no hosts.
    """
    nodes = targets(cluster)
    if len(nodes) > 1 and nodes[0].host is None:
        raise ConfigError(
            f"the file has {len(nodes)} nodes and no hosts",
            why="there is no way to reach them",
            help="give `hosts` in its node groups, or `cluster.hosts`",
        )
    return nodes


def recorded_cluster(name: str | None) -> ClusterRecord:
    """Return the record of the cluster of this name, or without a name of the only one.

    Raises:
        ClusterError: there is no such cluster.
    """
    record = cluster_records.recorded(name)
    if record is not None:
        return record
    recorded, name = cluster_records.names(), name or env_vars.CLUSTER.get()
    what = f"no cluster `{name}` is known on this machine" if name else "no cluster is known on this machine"
    others = f"known clusters: {', '.join(f'`{known_name}`' for known_name in recorded)}" if recorded else ""
    hint = f"bring one up with `rlinf up FILE`, or set `{env_vars.ADDRESS.name}` to one started by hand"
    raise ClusterError(what, why=others or None, help=hint)


def recorded_targets(record: ClusterRecord) -> tuple[NodeTarget, ...]:
    """Return the nodes of a running cluster, for probing and ending them; without their start variables."""
    ports = NodePorts.of(range(record.ports[0], record.ports[1] + 1))
    return tuple(
        NodeTarget(
            rank=node.rank,
            host=node.host,
            groups=node.groups,
            ssh=SshConfig.model_validate(dict(node.ssh)),
            interpreter=node.interpreter,
            declared_interpreter=True,
            ports=ports,
        )
        for node in record.nodes
    )


def address_of(facts: Mapping[str, Any], declared: str | None = None) -> str:
    """Return the address at which others reach a node: from the file, its Ray, ssh, or its default route."""
    record: Mapping[str, Any] = facts.get("record") or {}
    login = str(facts.get("address") or "")
    if declared is not None:
        return declared
    if record.get("alive") and record.get("address"):
        return str(record["address"])
    if login and ":" not in login and not login.startswith("127."):  # nodes reach each other over IPv4
        return login
    return str(facts["primary"])


def place(
    nodes: Sequence[NodeTarget],
    node_rank: int | None,
    head_address: str | None,
    environ: Mapping[str, str],
    declared: str | None = None,
) -> tuple[int | None, str | None]:
    """Return the rank of this machine and the address of node 0, for a node started on its own machine.

    By hand, Slurm or Kubernetes, each node is started on its own machine. If all nodes are to be started from here,
    the rank is None. The address may be None unless the rank is above 0.

    Args:
        nodes: the nodes of the file.
        node_rank, head_address: the options; by default from Slurm, if the file has no hosts.
        environ: the environment, for Slurm's variables.
        declared: `cluster.head_address` of the file, which comes before Slurm's.

    Raises:
        ConfigError: there is no such node, the head's address is missing, or there are no hosts.
    """
    if node_rank is None and head_address is not None:
        raise ConfigError("`--head-address` requires `--node-rank`", help="add `--node-rank K`")
    if head_address is not None and ":" in head_address:
        what = f"`{head_address}` is an IPv6 address or has a port"
        help = "give node 0's IPv4 address or name; `cluster.ports` sets the port"
        raise ConfigError(what, where="--head-address", help=help)
    if node_rank is None and (len(nodes) == 1 or nodes[0].host is not None):
        return None, declared
    rank_of_slurm, first_of_slurm = _from_slurm(environ)
    address = head_address or declared
    if node_rank is None:
        node_rank, address = rank_of_slurm, address or first_of_slurm
    if node_rank is None:
        raise ConfigError(
            f"the file has {len(nodes)} nodes and no hosts",
            why="there is no way to reach them",
            help="add `hosts` to the file, or run `rlinf up FILE --node-rank K --head-address A` on each machine",
        )
    if node_rank >= len(nodes):
        raise ConfigError(f"the file has no node {node_rank}", help=f"its nodes are 0 to {len(nodes) - 1}")
    if node_rank > 0:
        address = address or first_of_slurm
        if address is None:
            raise ConfigError("the address of node 0 is missing", help="add `--head-address A`")
    return node_rank, address


def _from_slurm(environ: Mapping[str, str]) -> tuple[int | None, str | None]:
    rank, listed = environ.get("SLURM_NODEID", ""), environ.get("SLURM_JOB_NODELIST", "")
    if not rank.isdigit():
        return None, None
    try:
        return int(rank), next(iter(expand_hosts(listed)), None) if listed else None
    except NotationError:
        return int(rank), None


def here(nodes: Sequence[NodeTarget]) -> tuple[NodeTarget, ...]:
    """Return the nodes as local nodes, without ssh."""
    return tuple(replace(node, host=None, ssh=SshConfig()) for node in nodes)


def _hosts(cluster: ClusterConfig) -> dict[int, str]:
    """Return the ssh destination of each node; empty if the file names none.

    Raises:
        ConfigError: some nodes have a host and others do not.
    """
    hosts = hosts_by_rank(cluster)
    missing = [rank for rank in range(cluster.num_nodes) if rank not in hosts]
    if hosts and missing:
        plural = len(missing) > 1
        raise ConfigError(
            f"node{'s' if plural else ''} {format_ranks(missing)} {'have' if plural else 'has'} no host, others have"
            " one",
            help="put the others into a group with `hosts`, in rank order",
        )
    return hosts


def _target(cluster: ClusterConfig, rank: int, host: str | None, ports: NodePorts) -> NodeTarget:
    members = [group for group in cluster.node_groups if rank in group.node_ranks]
    ssh = cluster.ssh
    for group in reversed(members):
        ssh = group.ssh.over(ssh) if group.ssh else ssh
    if host is not None and "@" in host:
        ssh = SshConfig(user=host.rpartition("@")[0]).over(ssh)
    declared = ray_interpreter(cluster, rank)
    interpreter = declared or sys.executable
    return NodeTarget(
        rank=rank,
        host=host,
        groups=tuple(group.label for group in members),
        ssh=ssh,
        interpreter=interpreter,
        declared_interpreter=declared is not None,
        ports=ports,
        accelerators=min(
            (group.accelerators for group in members if group.accelerators),
            key=lambda declared: declared.model is None,
            default=None,
        ),
        memory_gib=min((group.memory_gib for group in members if group.memory_gib is not None), default=None),
        robots=tuple(
            (group.hardware.type, unit)
            for group in members
            if group.hardware
            for unit in group.hardware.configs
            if unit.node_rank == rank
        ),
        forwarded=cluster.forward_env,
        environments=_environments(cluster, rank, members, interpreter),
    )


def _environments(
    cluster: ClusterConfig, rank: int, members: Sequence[NodeGroup], ray: str
) -> tuple[GroupEnvironment, ...]:
    """Return the environments of processes that may run on a node, without Ray's own."""
    with_robots = {group.label: group.hardware is not None for group in members}
    environments: dict[str, GroupEnvironment] = {}
    for label in (*with_robots, CLUSTER_LABEL):
        declared = process_environment(cluster, rank, label)
        if declared.interpreter is not None and (declared.variables or declared.interpreter != ray):
            variables = dict(declared.variables)
            environment = GroupEnvironment(label, declared.interpreter, variables, with_robots.get(label, False))
            environments.setdefault(
                repr((environment.interpreter, sorted(variables.items()), environment.has_robots)), environment
            )
    return tuple(environments.values())
