"""The nodes that serve a job under each rank: its own, and spares in the place of lost ones. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from rlinf_core.cluster.membership import NodeMember
from rlinf_core.config.machines.cluster import ClusterConfig, choose_spares, groups_of
from rlinf_core.errors import ClusterError
from rlinf_core.placement.component import can_lack, needed_nodes, nodes_of_components
from rlinf_core.suggest import quoted
from rlinf_core.topology import ACCELERATORS, ClusterTopology, NodeInfo

ABSENT: Final = NodeMember("", "")
"""Stands for a node that the job does without."""


class NodeChange(NamedTuple):
    """A node of the file that another one serves as, or that the job does without.

    Attributes:
        rank: its rank.
        text: who serves instead, or which components have fewer processes, in one line.
        reason: why, in one line.
    """

    rank: int
    text: str
    reason: str


class Seats(NamedTuple):
    """The nodes of a job.

    Attributes:
        members: the nodes by rank, with a stand-in for each that is absent; in any order until `ranked`.
        replaced: the spare that serves as each lost node, by its rank.
        absent: the lost nodes that elastic components do without.
        changes: the same in words.
        ranked: whether the members are in the order of their ranks.
    """

    members: tuple[NodeMember, ...]
    replaced: Mapping[int, int] = MappingProxyType({})
    changes: tuple[NodeChange, ...] = ()
    ranked: bool = False
    absent: frozenset[int] = frozenset()

    def own_rank(self, rank: int) -> int:
        """Return the rank in the file of the node that serves under `rank`."""
        return self.replaced.get(rank, rank)


def take_seats(
    cluster: ClusterConfig, joined: Sequence[NodeMember], lost: Mapping[int, str], *, late: bool = False
) -> Seats | None:
    """Return the nodes that serve under each rank; None while one is missing that no spare may replace, and that the
    job cannot do without.

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
    """Return what a lost node had: what the file declares, else what a node of the same groups has.

    Ranks of accelerators count those of the nodes before.

    Args:
        cluster: the nodes of the file.
        rank: the lost node.
        nodes: the nodes that were probed, by rank.
        absent: the nodes that were not.
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
    """Check that spares have as many accelerators as the nodes of the same groups; `nodes` are those probed, by rank.

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
