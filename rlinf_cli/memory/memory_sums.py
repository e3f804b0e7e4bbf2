"""Sums of a memory forecast per host and accelerator, against the nodes' memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rlinf_core.config.machines.cluster import ClusterConfig
    from rlinf_core.job.process_forecast import ProcessForecast
    from rlinf_core.placement.placement import Placement


class NodeMemory(NamedTuple):
    """The memory of a node.

    Attributes:
        host: bytes; None if unknown.
        accelerator: bytes of each of its accelerators; None if unknown.
        is_here: whether `host` is this machine's memory, as nothing declares the node's.
    """

    host: int | None = None
    accelerator: int | None = None
    is_here: bool = False


class NodeNeed(NamedTuple):
    """The peak memory of the processes of a node.

    Attributes:
        host: bytes of the host's memory.
        accelerator: bytes of the most used accelerator; 0 if none is used.
    """

    host: int
    accelerator: int = 0

    def fits(self, has: NodeMemory) -> bool:
        """Return whether a node has enough memory; unknown memory counts as enough."""
        return (has.host is None or self.host <= has.host) and (
            has.accelerator is None or self.accelerator <= has.accelerator
        )


def node_memory(
    cluster: ClusterConfig, ranks: Iterable[int], *, host_gib: float | None, here: int | None
) -> dict[int, NodeMemory]:
    """Return the memory of nodes by rank: as given, else as declared, else this machine's.

    Args:
        cluster: the section of the file.
        ranks: of the nodes.
        host_gib: GiB of each node's host, overriding the file; None if not given.
        here: bytes of this machine.
    """
    memory_by_rank: dict[int, NodeMemory] = {}
    for rank in ranks:
        members = [group for group in cluster.node_groups if rank in group.node_ranks]
        hosts = (
            [host_gib]
            if host_gib is not None
            else [member.memory_gib for member in members if member.memory_gib is not None]
        )
        declared = [member.accelerators.memory_gib for member in members if member.accelerators is not None]
        accelerators = [size for size in declared if size is not None]
        host = _bytes(hosts)
        is_here = host is None and here is not None
        memory_by_rank[rank] = NodeMemory(here if host is None else host, _bytes(accelerators), is_here)
    return memory_by_rank


def _bytes(sizes: Sequence[float]) -> int | None:
    """Return the least of sizes in GiB, in bytes; None if there are none."""
    return int(min(sizes) * 2**30) if sizes else None


def accelerated(placements: Mapping[str, Sequence[Placement]]) -> Collection[str]:
    """Return the components whose processes have assigned accelerators."""
    return {
        name
        for name, component_placements in placements.items()
        if any(placement.local_accelerator_rank is not None for placement in component_placements)
    }


def sums(forecasts: Sequence[ProcessForecast], placements: Mapping[str, Sequence[Placement]]) -> dict[int, NodeNeed]:
    """Return the peak demand of each node's processes, by rank."""
    hosts: Counter[int] = Counter()
    devices: Counter[tuple[int, int]] = Counter()
    for forecast in forecasts:
        for placement in placements[forecast.component]:
            node, index = placement.cluster_node_rank, placement.local_accelerator_rank
            hosts[node] += forecast.on_host(accelerated=index is not None)
            if index is not None:
                devices[node, index] += forecast.on_device
    fullest: Counter[int] = Counter()
    for (node, _), size in devices.items():
        fullest[node] = max(fullest[node], size)
    return {node: NodeNeed(size, fullest[node]) for node, size in sorted(hosts.items())}


def fit(needs: Mapping[int, NodeNeed], has: Mapping[int, NodeMemory]) -> bool:
    """Return whether every node has enough memory."""
    return all(need.fits(has[rank]) for rank, need in needs.items())
