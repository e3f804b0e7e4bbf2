"""Small clusters to place things on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.topology import ClusterTopology

Groups = dict[str, tuple[str, int | None]]


def _cluster(
    num_nodes: int, per_node: int | None = None, *, placement: dict[str, Any] | None = None, groups: Any = ()
) -> ClusterConfig:
    """Return `num_nodes` nodes; without `groups` one group `all` declares `per_node` accelerators on every node."""
    if not groups and per_node is not None:
        groups = [{"label": "everything", "node_ranks": "all", "accelerators": {"per_node": per_node}}]
    data = {"num_nodes": num_nodes, "node_groups": list(groups), "component_placement": placement or {}}
    return ClusterConfig.model_validate(data)


@pytest.fixture
def make_cluster() -> Callable[..., ClusterConfig]:
    return _cluster


@pytest.fixture
def place_one() -> Callable[..., list[Any]]:
    """The placements of one component of a cluster that has no other."""

    def place(cluster: ClusterConfig, isolate_accelerator: bool = True) -> list[Any]:
        topology = ClusterTopology.from_config(cluster)
        components = ComponentPlacement(cluster, topology)
        (name,) = components.components
        return components.get_strategy(name).get_placement(topology, isolate_accelerator)

    return place


@pytest.fixture
def two_kinds() -> list[dict[str, Any]]:
    """Node 0 is `a800`, node 1 is `4090`, 8 accelerators each."""
    return [
        {"label": "a800", "node_ranks": 0, "accelerators": {"per_node": 8, "model": "A800"}},
        {"label": "4090", "node_ranks": 1, "accelerators": {"per_node": 8}},
    ]


@pytest.fixture
def eighteen() -> ClusterConfig:
    """The cluster of 18 nodes: 8 x A800, 8 x 4090, two Franka arms, an agent on the first four nodes."""
    return ClusterConfig.model_validate(
        {
            "num_nodes": 18,
            "component_placement": {
                "actor": {"node_group": "a800", "placement": "0-63"},
                "rollout": {"node_group": 4090, "placement": "0-63"},
                "env": {"node_group": "franka", "placement": "0-1"},
                "agent": {"node_group": "node", "placement": "0-1:0-199,2-3:200-399"},
            },
            "node_groups": [
                {
                    "label": "a800",
                    "node_ranks": "0-7",
                    "env_configs": [
                        {
                            "node_ranks": "0-7",
                            "python_interpreter_path": "/opt/venv/openpi/bin/python3",
                            "env_vars": [{"GLOO_SOCKET_IFNAME": "eth0"}],
                        }
                    ],
                },
                {
                    "label": 4090,
                    "node_ranks": "8-15",
                    "env_configs": [{"node_ranks": "8-15", "env_vars": [{"GLOO_SOCKET_IFNAME": "eth1"}]}],
                },
                {
                    "label": "franka",
                    "node_ranks": "16-17",
                    "hardware": {
                        "type": "Franka",
                        "configs": [
                            {"robot_ip": "10.10.10.1", "node_rank": 16, "camera_serials": ["322142001230"]},
                            {"robot_ip": "10.10.10.2", "node_rank": 17, "camera_serials": ["322142001232"]},
                        ],
                    },
                },
            ],
        }
    )
