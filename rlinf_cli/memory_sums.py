"""Sums of a forecast of memory: of the hosts, and of their accelerators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.training.memory import ProcessForecast
    from rlinf_core.placement.placement import Placement


def accelerated(placements: Mapping[str, Sequence[Placement]]) -> Collection[str]:
    """Return the components whose processes have accelerators assigned to them."""
    return {name for name, each in placements.items() if any(one.local_accelerator_rank is not None for one in each)}


def sums(
    forecasts: Sequence[ProcessForecast], placements: Mapping[str, Sequence[Placement]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the most that the processes of each node hold of its memory, and of that of its fullest accelerator."""
    hosts: Counter[int] = Counter()
    devices: Counter[tuple[int, int]] = Counter()
    for each in forecasts:
        for placement in placements[each.component]:
            node, index = placement.cluster_node_rank, placement.local_accelerator_rank
            hosts[node] += each.on_host(accelerated=index is not None)
            if index is not None:
                devices[node, index] += each.on_device
    fullest: dict[int, int] = {}
    for (node, _), size in devices.items():
        if size:
            fullest[node] = max(fullest.get(node, 0), size)
    return dict(hosts), fullest
