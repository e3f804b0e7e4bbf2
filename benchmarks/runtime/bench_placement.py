"""The time to place a process on every accelerator of a large cluster, and whether it grows linearly.

    python benchmarks/runtime/bench_placement.py

Prints one line for each cluster size: nodes, processes, seconds (the best of three), and the growth since the line
before, which is 2 where the cost is proportional to the number of nodes. Exits with 1 when 80,000 processes take
2 s or more.
"""

from __future__ import annotations

import gc
import sys
import time

from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.topology import ClusterTopology

SIZES = (1250, 2500, 5000, 10_000)
PER_NODE = 8
GOAL_SECONDS = 2.0
ROUNDS = 3


def cluster(num_nodes: int) -> ClusterConfig:
    half = num_nodes // 2
    return ClusterConfig.model_validate(
        {
            "num_nodes": num_nodes,
            "component_placement": {
                "actor": {"node_group": "train", "placement": "all"},
                "rollout": {"node_group": "sim", "placement": f"0-{half * PER_NODE - 1}"},
            },
            "node_groups": [
                {"label": "train", "node_ranks": f"0-{half - 1}", "accelerators": {"per_node": PER_NODE}},
                {"label": "sim", "node_ranks": f"{half}-{num_nodes - 1}", "accelerators": {"per_node": PER_NODE}},
            ],
        }
    )


def lay_out(config: ClusterConfig) -> int:
    """Return the number of processes placed."""
    topology = ClusterTopology.from_config(config)
    components = ComponentPlacement(config, topology)
    return sum(len(components.get_strategy(name).get_placement(topology)) for name in components.components)


def best_of(config: ClusterConfig) -> tuple[int, float]:
    seconds: list[float] = []
    processes = 0
    for _ in range(ROUNDS):
        gc.collect()
        start = time.perf_counter()
        processes = lay_out(config)
        seconds.append(time.perf_counter() - start)
    return processes, min(seconds)


def main() -> int:
    print(f"{'nodes':>8} {'processes':>10} {'seconds':>9} {'growth':>7}")
    before: float | None = None
    seconds = 0.0
    for num_nodes in SIZES:
        processes, seconds = best_of(cluster(num_nodes))
        growth = f"{seconds / before:7.2f}" if before else f"{'-':>7}"
        print(f"{num_nodes:>8} {processes:>10} {seconds:>9.3f} {growth}")
        before = seconds
    return 0 if seconds < GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
