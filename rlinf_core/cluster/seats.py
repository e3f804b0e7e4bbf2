"""The nodes that serve a job under each rank: its own, and spares in the place of lost ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rlinf_core.cluster.membership import NodeMember
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.machines.spares import choose_spares, groups_of
from rlinf_core.errors import ClusterError
from rlinf_core.topology import ACCELERATORS, NodeInfo


class NodeChange(NamedTuple):
    """A node of the file that another one serves as.

    Attributes:
        rank: its rank.
        text: who serves instead, in one line.
        reason: why, in one line.
    """

    rank: int
    text: str
    reason: str


class Seats(NamedTuple):
    """The nodes of a job.

    Attributes:
        members: the nodes by rank; in any order until `ranked`.
        replaced: the spare that serves as each lost node, by its rank.
        changes: the same in words.
        ranked: whether the members are in the order of their ranks.
    """

    members: tuple[NodeMember, ...]
    replaced: Mapping[int, int] = MappingProxyType({})
    changes: tuple[NodeChange, ...] = ()
    ranked: bool = False

    def own_rank(self, rank: int) -> int:
        """Return the rank in the file of the node that serves under `rank`."""
        return self.replaced.get(rank, rank)


def take_seats(
    cluster: ClusterConfig, joined: Sequence[NodeMember], lost: Mapping[int, str], *, late: bool = False
) -> Seats | None:
    """Return the nodes that serve under each rank; None while one is missing that no spare may replace.

    Args:
        cluster: the nodes of the file.
        joined: the living nodes; those without a label of their rank cannot be told apart.
        lost: how each node was lost, by rank: these may be replaced.
        late: whether nodes may be replaced that have not joined at all.
    """
    by_rank = {member.label_rank: member for member in joined if member.label_rank is not None}
    if len(by_rank) < len(joined):
        return None
    missing = [rank for rank in range(cluster.num_active_nodes) if rank not in by_rank]
    replaceable = [rank for rank in missing if late or rank in lost]
    replaced = choose_spares(cluster, replaceable, [rank for rank in cluster.spare_ranks if rank in by_rank])
    if len(replaced) < len(missing):
        return None
    members = tuple(by_rank[replaced.get(rank, rank)] for rank in range(cluster.num_active_nodes))
    changes = tuple(
        NodeChange(
            rank,
            f"node {spare} ({by_rank[spare].ip}), a spare, serves as node {rank}",
            lost.get(rank, f"node {rank} did not join in time"),
        )
        for rank, spare in replaced.items()
    )
    return Seats(members, replaced, changes, ranked=True)


def check_hardware(cluster: ClusterConfig, seats: Seats, nodes: Sequence[NodeInfo]) -> None:
    """Check that spares have as many accelerators as the nodes of the same groups; `nodes` are those probed, by rank.

    Raises:
        ClusterError: a spare differs.
    """
    for rank, spare in seats.replaced.items():
        labels = groups_of(cluster, spare)
        peers = (node for node in nodes if node.rank not in seats.replaced and groups_of(cluster, node.rank) == labels)
        peer, own = next(peers, None), nodes[rank].num_accelerators
        if peer is not None and own is not None and own != peer.num_accelerators:
            raise ClusterError(
                f"node {spare} cannot serve as node {rank}, which is lost: their accelerators differ",
                why=f"it has {ACCELERATORS.counted(own)}, node {peer.rank} of the same groups"
                f" {ACCELERATORS.counted(peer.num_accelerators or 0)}",
                help=f"start node {rank} again by `rlinf up FILE`, or give its spare the same hardware",
            )
