"""The nodes of a cluster, their facts and ranks, and the seats: the nodes that serve a job.

Under each rank, the node of that rank serves the job, or a spare in its place if it is lost.
"""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from rlinf_core import env_vars
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.collective.handshake import listen_tcp
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.sections.cluster import ClusterConfig, choose_spares, groups_of
from rlinf_core.errors import ClusterError
from rlinf_core.hardware.accelerators import find_accelerators
from rlinf_core.node.attach import RANK_LABEL
from rlinf_core.placement.component import can_lack, needed_nodes, nodes_of_components
from rlinf_core.suggest import quoted
from rlinf_core.topology import ACCELERATORS, ClusterTopology, NodeInfo
from rlinf_core.version import __version__

_BUFFER_BYTES = 1 << 16
# Below Linux's ephemeral ports, one of which a client may be given before it is used, and beside those of Ray.
_LASTING_PORTS = range(21000, 32768)


def probe() -> tuple[NodeInfo, int | None]:
    """Return the facts of this machine, with rank -1, and `RLINF_NODE_RANK` from the environment of its Ray.

    `python` is the interpreter of Ray there.
    """
    accelerators = find_accelerators()
    devices = accelerators.devices
    ids = tuple(device.visible_id for device in devices)
    info = NodeInfo(
        rank=-1,
        hostname=socket.gethostname(),
        python=sys.executable,
        versions=(("python", platform.python_version()), ("ray", ray_api().__version__), ("rlinf", __version__)),
        num_accelerators=len(devices),
        accelerator_type=accelerators.accelerator.name if devices else None,
        accelerator_model=devices[0].model if devices else None,
        accelerator_ids=() if ids == tuple(map(str, range(len(ids)))) else ids,
        accelerator_identities=tuple(device.identities for device in devices),
    )
    return info, env_vars.NODE_RANK.get()


def free_port() -> int:
    """Return a TCP port of this machine that is free now, within `RLINF_PORTS` if set."""
    with listen_tcp("", _BUFFER_BYTES, env_vars.PORTS.get() or _LASTING_PORTS) as listener:
        return int(listener.getsockname()[1])


@dataclass(frozen=True, slots=True)
class NodeMember:
    """A node that joined Ray, with its rank from `rlinf up`, and once probed with its facts and `RLINF_NODE_RANK`."""

    ray_id: str
    ip: str
    label_rank: int | None = None
    facts: NodeInfo | None = None
    declared_rank: int | None = None

    def info(self, rank: int) -> NodeInfo:
        """Return the facts of the node, under this rank."""
        return (self.facts or NodeInfo(rank))._replace(rank=rank, ip=self.ip)


def members(nodes: Sequence[Mapping[str, Any]]) -> list[NodeMember]:
    """Return the living nodes in `ray.nodes()`."""
    living: list[NodeMember] = []
    for node in nodes:
        if node["Alive"]:
            labels = node.get("Labels", {})
            rank = str(labels.get(RANK_LABEL, ""))
            rank_number = int(rank) if rank.isdigit() else None
            living.append(NodeMember(node["NodeID"], node["NodeManagerAddress"], rank_number))
    return living


def rank_members(joined: Sequence[NodeMember], driver_ip: str) -> list[NodeMember]:
    """Return the nodes in the order of their ranks.

    Ranks are the labels that `rlinf up` set, else every node's `RLINF_NODE_RANK`, else they follow the numeric
    addresses, with the driver's node first.

    Raises:
        ClusterError: only some nodes have a rank, two have the same rank, or a rank is missing.
    """
    for source, ranks in (
        ("the label of `rlinf up`", [member.label_rank for member in joined]),
        ("`RLINF_NODE_RANK`", [member.declared_rank for member in joined]),
    ):
        if any(rank is not None for rank in ranks):
            return _by_given_rank(joined, ranks, source)
    return sorted(joined, key=lambda member: (member.ip != driver_ip, int(ip_address(member.ip)), member.ray_id))


def _by_given_rank(joined: Sequence[NodeMember], ranks: Sequence[int | None], source: str) -> list[NodeMember]:
    by_rank: dict[int, NodeMember] = {}
    for member, rank in zip(joined, ranks, strict=True):
        if rank is None:
            raise ClusterError(
                f"the node at {member.ip} has no rank, but others have one",
                why=f"ranks come from {source}, which must be set on all nodes or on none",
            )
        if rank in by_rank:
            raise ClusterError(
                f"the nodes at {by_rank[rank].ip} and {member.ip} both have rank {rank}",
                why=f"ranks come from {source}",
            )
        by_rank[rank] = member
    missing = [rank for rank in range(len(joined)) if rank not in by_rank]
    if missing:
        extra = sorted(rank for rank in by_rank if rank >= len(joined))
        raise ClusterError(
            f"{len(joined)} nodes have the ranks {format_ranks(sorted(by_rank))}: {format_ranks(missing)} is missing",
            why=f"ranks come from {source}",
            help=f"ranks must be 0 to {len(joined) - 1} without gaps; correct rank {extra[0]}" if extra else None,
        )
    return [by_rank[rank] for rank in range(len(joined))]


def missing_ranks(joined: Sequence[NodeMember], num_nodes: int) -> str:
    """Return a message on the ranks that have not joined, or without labels on the addresses that have."""
    present = {member.label_rank for member in joined if member.label_rank is not None}
    if len(present) == len(joined):
        return f"missing: rank {format_ranks(rank for rank in range(num_nodes) if rank not in present)}"
    return "joined: " + (", ".join(member.ip for member in joined) or "none")


def departed(nodes: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return a message on each rank that joined and was lost, with Ray's reason."""
    alive = {member.label_rank for member in members(nodes)}
    reasons: dict[int, str] = {}
    for node in nodes:
        rank = str(node.get("Labels", {}).get(RANK_LABEL, ""))
        if not node["Alive"] and rank.isdigit() and int(rank) not in alive:
            reason = str(node.get("DeathReasonMessage") or "").strip().partition("\n")[0]
            lost = f"node {rank} ({node['NodeManagerAddress']}) joined and was lost"
            reasons[int(rank)] = f"{lost}: {reason}" if reason else lost
    return dict(sorted(reasons.items()))


ABSENT: Final = NodeMember("", "")
"""The stand-in for a node without which the job runs."""


class NodeChange(NamedTuple):
    """A node of the file that a spare replaces, or without which the job runs.

    Attributes:
        text: which spare replaces it, or which components run without it, in one line.
        reason: why it is missing, in one line.
    """

    rank: int
    text: str
    reason: str


class Seats(NamedTuple):
    """The nodes of a job.

    Attributes:
        members: the nodes by rank, with `ABSENT` for each absent one; in any order until `ranked`.
        replaced: the rank of the spare that replaces each lost node, by the rank of the lost node.
        absent: the ranks of lost nodes without which elastic components run.
        changes: the replaced and absent nodes with their descriptions.
        ranked: whether the members are in the order of their ranks.
    """

    members: tuple[NodeMember, ...]
    replaced: Mapping[int, int] = MappingProxyType({})
    changes: tuple[NodeChange, ...] = ()
    ranked: bool = False
    absent: frozenset[int] = frozenset()

    def own_rank(self, rank: int) -> int:
        """Return the rank, in the file, of the node that serves under `rank`."""
        return self.replaced.get(rank, rank)


def take_seats(
    cluster: ClusterConfig, joined: Sequence[NodeMember], lost: Mapping[int, str], *, late: bool = False
) -> Seats | None:
    """Return the nodes that serve under each rank; None while a node is missing that no spare can replace and without
    which the job cannot run.

    Args:
        joined: the living nodes; if one lacks a rank label, the result is None.
        lost: how each lost node was lost, by rank: these may be replaced.
        late: whether nodes that have never joined may be replaced, too.
    """
    by_rank = {member.label_rank: member for member in joined if member.label_rank is not None}
    if len(by_rank) < len(joined):
        return None
    missing = [rank for rank in range(cluster.num_active_nodes) if rank not in by_rank]
    if any(not late and rank not in lost for rank in missing):
        return None
    elastic = _nodes_of_elastic(cluster) if missing else {}
    needed = needed_nodes(cluster) if elastic else missing
    spares = [rank for rank in cluster.spare_ranks if rank in by_rank]
    replaced = choose_spares(cluster, missing, spares, needed)
    absent = frozenset(missing) - replaced.keys()
    if absent and not (elastic and can_lack(cluster, absent)):
        return None
    members = [by_rank.get(replaced.get(rank, rank), ABSENT) for rank in range(cluster.num_active_nodes)]
    changes: list[NodeChange] = []
    for rank in missing:
        if rank in replaced:
            spare = replaced[rank]
            text = f"node {spare} ({by_rank[spare].ip}), a spare, serves as node {rank}"
        else:
            names = quoted(name for name, nodes in elastic.items() if rank in nodes)
            text = f"{names or 'the job'} {'goes' if ',' not in names else 'go'} on without node {rank}"
        changes.append(NodeChange(rank, text, lost.get(rank, f"node {rank} did not join in time")))
    return Seats(tuple(members), replaced, tuple(changes), ranked=True, absent=absent)


def _nodes_of_elastic(cluster: ClusterConfig) -> dict[str, frozenset[int]]:
    """Return the nodes of each elastic component."""
    if not any(entry.elastic for entry in cluster.component_placement.values()):
        return {}
    used = nodes_of_components(cluster)
    return {name: nodes for name, nodes in used.items() if cluster.component_placement[name].elastic}


def stand_in(cluster: ClusterConfig, rank: int, nodes: Sequence[NodeInfo], absent: Collection[int]) -> NodeInfo:
    """Return the facts of a lost node: those that the file declares, else those of a node of the same groups.

    The ranks of later accelerators depend on their number.

    Args:
        nodes: the facts of the nodes, by rank; those of `absent` nodes are unknown.
        absent: the ranks of the absent nodes.
    """
    declared = ClusterTopology.from_config(cluster).nodes[rank]
    labels = groups_of(cluster, rank)
    peers = (node for node in nodes if node.rank not in absent and groups_of(cluster, node.rank) == labels)
    like = declared if declared.num_accelerators is not None else next(peers, declared)
    return NodeInfo(
        rank,
        num_accelerators=like.num_accelerators or 0,
        accelerator_type=like.accelerator_type,
        accelerator_model=like.accelerator_model,
        accelerator_ids=like.accelerator_ids,
    )


def check_hardware(cluster: ClusterConfig, seats: Seats, nodes: Sequence[NodeInfo]) -> None:
    """Check that spares have as many accelerators as other nodes of their groups; `nodes` holds the facts by rank.

    Raises:
        ClusterError: a spare differs.
    """
    for rank, spare in seats.replaced.items():
        labels = groups_of(cluster, spare)
        others = (node for node in nodes if node.rank not in seats.absent and node.rank not in seats.replaced)
        peers = (node for node in others if groups_of(cluster, node.rank) == labels)
        peer, own = next(peers, None), nodes[rank].num_accelerators
        if peer is not None and own is not None and own != peer.num_accelerators:
            raise ClusterError(
                f"node {spare} cannot serve as node {rank}, which is lost: their accelerators differ",
                why=f"it has {ACCELERATORS.counted(own)}, node {peer.rank} of the same groups"
                f" {ACCELERATORS.counted(peer.num_accelerators or 0)}",
                help=f"start node {rank} again by `rlinf up FILE`, or give its spare the same hardware",
            )
