"""Sums of a forecast of memory, of hosts and of their accelerators, and what the nodes have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from recipes.training.memory.process_forecast import ProcessForecast
    from rlinf_core.config.machines.cluster import ClusterConfig
    from rlinf_core.placement.placement import Placement


class NodeMemory(NamedTuple):
    """The memory that a node has.

    Attributes:
        host: bytes; None: not known.
        accelerator: bytes of each of its accelerators; None: not known.
        is_here: `host` is the memory of this machine, for want of anything that says what the node has.
    """

    host: int | None = None
    accelerator: int | None = None
    is_here: bool = False


class NodeNeed(NamedTuple):
    """The memory that the processes of a node hold at most.

    Attributes:
        host: bytes of the host's memory.
        accelerator: bytes of the accelerator that is used most; 0: none is.
    """

    host: int
    accelerator: int = 0

    def fits(self, has: NodeMemory) -> bool:
        """Return whether a node has enough; what is not known counts as enough."""
        return (has.host is None or self.host <= has.host) and (
            has.accelerator is None or self.accelerator <= has.accelerator
        )


def node_memory(
    cluster: ClusterConfig, ranks: Iterable[int], *, given: float | None, here: int | None
) -> dict[int, NodeMemory]:
    """Return the memory of nodes by rank: what is given, else what the file declares, else that of this machine.

    Args:
        cluster: the section of the file.
        ranks: of the nodes.
        given: GiB of each node's host, which win over the file; None: not given.
        here: bytes of this machine.
    """
    found: dict[int, NodeMemory] = {}
    for rank in ranks:
        members = [group for group in cluster.node_groups if rank in group.node_ranks]
        hosts = [given] if given is not None else [each.memory_gib for each in members if each.memory_gib is not None]
        declared = [each.accelerators.memory_gib for each in members if each.accelerators is not None]
        accelerators = [each for each in declared if each is not None]
        host = _bytes(hosts)
        is_here = host is None and here is not None
        found[rank] = NodeMemory(here if host is None else host, _bytes(accelerators), is_here)
    return found


def _bytes(sizes: Sequence[float]) -> int | None:
    """Return the least of some sizes in GiB; None where there is none."""
    return int(min(sizes) * 2**30) if sizes else None


def accelerated(placements: Mapping[str, Sequence[Placement]]) -> Collection[str]:
    """Return the components whose processes have accelerators assigned to them."""
    return {name for name, each in placements.items() if any(one.local_accelerator_rank is not None for one in each)}


def sums(forecasts: Sequence[ProcessForecast], placements: Mapping[str, Sequence[Placement]]) -> dict[int, NodeNeed]:
    """Return the most that the processes of each node hold, by the node's rank."""
    hosts: Counter[int] = Counter()
    devices: Counter[tuple[int, int]] = Counter()
    for each in forecasts:
        for placement in placements[each.component]:
            node, index = placement.cluster_node_rank, placement.local_accelerator_rank
            hosts[node] += each.on_host(accelerated=index is not None)
            if index is not None:
                devices[node, index] += each.on_device
    fullest: Counter[int] = Counter()
    for (node, _), size in devices.items():
        fullest[node] = max(fullest[node], size)
    return {node: NodeNeed(size, fullest[node]) for node, size in sorted(hosts.items())}


def fit(needs: Mapping[int, NodeNeed], has: Mapping[int, NodeMemory]) -> bool:
    """Return whether every node has enough."""
    return all(need.fits(has[rank]) for rank, need in needs.items())
