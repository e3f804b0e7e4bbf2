"""The picture of a placement: how nodes are grouped."""

from __future__ import annotations

from rlinf_cli.placement.placement_picture import labels_of
from rlinf_core.topology import ClusterTopology
from tests.unit.test_topology import FRANKA, cluster


def test_labels_of_a_node_are_the_users_own() -> None:
    topology = ClusterTopology.from_config(cluster(3, FRANKA, {"label": "second", "node_ranks": "2"}))
    assert [labels_of(topology, rank) for rank in range(3)] == [(), ("arms",), ("arms", "second")]
