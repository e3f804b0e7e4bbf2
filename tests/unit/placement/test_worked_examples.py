"""The examples of the placement specification, by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.placement.component import ComponentPlacement, PlacementMode
from rlinf_core.placement.strategies import PackedPlacementStrategy
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology

Make = Callable[..., ClusterConfig]
PlaceOne = Callable[..., list[Placement]]


def where(placements: list[Placement]) -> list[tuple[int, list[int]]]:
    """(node, local hardware ranks) of every process."""
    assert [placement.rank for placement in placements] == list(range(len(placements)))
    assert {placement.world_size for placement in placements} <= {len(placements)}
    return [(placement.cluster_node_rank, list(placement.local_hardware_ranks)) for placement in placements]


def on(node: int, *locals_: int | list[int]) -> list[tuple[int, list[int]]]:
    return [(node, [item] if isinstance(item, int) else item) for item in locals_]


def test_1_one_process_an_accelerator(make_cluster: Make, place_one: PlaceOne) -> None:
    placements = place_one(make_cluster(1, 8, placement={"actor": "0-7"}))
    assert where(placements) == on(0, *range(8))
    assert [placement.local_rank for placement in placements] == list(range(8))


def test_2_two_components_on_the_same_accelerators(make_cluster: Make) -> None:
    cluster = make_cluster(1, 8, placement={"actor,rollout": "0-3"})
    topology = ClusterTopology.from_config(cluster)
    components = ComponentPlacement(cluster, topology)
    assert components.components == ("actor", "rollout")
    for name in components.components:
        assert where(components.get_strategy(name).get_placement(topology)) == on(0, 0, 1, 2, 3)
        assert components.get_world_size(name) == 4
        assert components.get_hardware_ranks(name) == [0, 1, 2, 3]
    assert components.placement_mode is PlacementMode.COLLOCATED


def test_3_all_over_two_nodes(make_cluster: Make, place_one: PlaceOne) -> None:
    placements = place_one(make_cluster(2, 4, placement={"actor": "all"}))
    assert where(placements) == on(0, 0, 1, 2, 3) + on(1, 0, 1, 2, 3)
    assert [placement.local_rank for placement in placements] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [placement.placement_node_rank for placement in placements] == [0] * 4 + [1] * 4
    assert {placement.local_world_size for placement in placements} == {4}


def test_4_processes_share_a_resource(make_cluster: Make, place_one: PlaceOne) -> None:
    placements = place_one(make_cluster(1, 8, placement={"env": "0-1:0-3"}))
    assert where(placements) == on(0, 0, 0, 1, 1)


def test_5_processes_hold_several_resources(make_cluster: Make, place_one: PlaceOne) -> None:
    placements = place_one(make_cluster(1, 8, placement={"actor": "0-7:0-3"}))
    assert where(placements) == on(0, [0, 1], [2, 3], [4, 5], [6, 7])
    assert placements[1].environment()["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_6_parts_of_every_kind(make_cluster: Make, place_one: PlaceOne) -> None:
    placements = place_one(make_cluster(2, 8, placement={"agent": "0-1:0-3,3-5,7-10:7-14"}))
    assert where(placements) == on(0, 0, 0, 1, 1, 3, 4, 5, 7, 7) + on(1, 0, 0, 1, 1, 2, 2)


def test_7_resources_with_gaps(make_cluster: Make, place_one: PlaceOne) -> None:
    assert where(place_one(make_cluster(1, 8, placement={"actor": "0-2,5,7"}))) == on(0, 0, 1, 2, 5, 7)


def test_8_two_groups(make_cluster: Make, place_one: PlaceOne, two_kinds: Any) -> None:
    entry = {"node_group": "a800,4090", "placement": "6-9"}
    placements = place_one(make_cluster(2, groups=two_kinds, placement={"actor": entry}))
    assert where(placements) == on(0, 6, 7) + on(1, 0, 1)
    assert [placement.node_group_label for placement in placements] == ["a800", "a800", "4090", "4090"]


def test_9_two_groups_the_other_way_round(make_cluster: Make, place_one: PlaceOne, two_kinds: Any) -> None:
    entry = {"node_group": [4090, "a800"], "placement": "6-9"}
    placements = place_one(make_cluster(2, groups=two_kinds, placement={"actor": entry}))
    assert where(placements) == on(1, 6, 7) + on(0, 0, 1)
    assert [placement.placement_node_rank for placement in placements] == [0, 0, 1, 1]


def test_10_ranks_are_local_to_the_group(make_cluster: Make, place_one: PlaceOne) -> None:
    groups = [{"label": "b", "node_ranks": "1-2", "accelerators": {"per_node": 8}}]
    entry = {"node_group": "b", "placement": "4-11"}
    placements = place_one(make_cluster(3, groups=groups, placement={"actor": entry}))
    assert where(placements) == on(1, 4, 5, 6, 7) + on(2, 0, 1, 2, 3)
    assert [placement.placement_node_rank for placement in placements] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_11_nodes_whatever_they_hold(make_cluster: Make, place_one: PlaceOne) -> None:
    entry = {"node_group": "node", "placement": "0-1:0-3"}
    placements = place_one(make_cluster(2, 8, placement={"agent": entry}))
    assert where(placements) == on(0, [], []) + on(1, [], [])
    assert all(placement.local_accelerator_rank is None for placement in placements)
    assert {placement.visible_accelerators for placement in placements} == {tuple(range(8))}
    assert not any("CUDA_VISIBLE_DEVICES" in placement.environment() for placement in placements)


def test_12_nodes_without_accelerators(make_cluster: Make, place_one: PlaceOne) -> None:
    placements = place_one(make_cluster(2, 0, placement={"agent": "0-1"}))
    assert where(placements) == on(0, 0) + on(1, 0)
    assert {placement.hardware_type for placement in placements} == {"node"}


def test_13_a_robot_a_process(eighteen: ClusterConfig) -> None:
    topology = ClusterTopology.from_config(eighteen, ["a800=8", "4090=8"])
    placements = ComponentPlacement(eighteen, topology).get_strategy("env").get_placement(topology)
    assert where(placements) == on(16, 0) + on(17, 0)
    assert {placement.hardware_type for placement in placements} == {"Franka"}
    assert {placement.visible_accelerators for placement in placements} == {()}


def test_a_robots_process_sees_all_accelerators_of_its_node(eighteen: ClusterConfig) -> None:
    topology = ClusterTopology.from_config(eighteen, ["a800=8", "4090=8", "franka=2"])
    placements = ComponentPlacement(eighteen, topology).get_strategy("env").get_placement(topology)
    assert {placement.visible_accelerators for placement in placements} == {(0, 1)}
    assert {placement.local_accelerator_rank for placement in placements} == {None}
    assert not any("CUDA_VISIBLE_DEVICES" in placement.environment() for placement in placements)


def test_14_two_processes_a_robot(eighteen: ClusterConfig) -> None:
    topology = ClusterTopology.from_config(eighteen)
    config = {"cluster": {"component_placement": {"env": {"node_group": "franka", "placement": "0-1:0-3"}}}}
    placements = ComponentPlacement(config, topology).get_strategy("env").get_placement(topology)
    assert where(placements) == on(16, 0, 0) + on(17, 0, 0)


def test_15_eighteen_nodes(eighteen: ClusterConfig) -> None:
    topology = ClusterTopology.from_config(eighteen, ["a800=8", "4090=8xRTX 4090"])
    components = ComponentPlacement(eighteen, topology)
    worlds = {name: components.get_world_size(name) for name in components.components}
    assert worlds == {"actor": 64, "rollout": 64, "env": 2, "agent": 400}
    agents = components.get_strategy("agent").get_placement(topology)
    nodes = [placement.cluster_node_rank for placement in agents]
    assert nodes == [0] * 100 + [1] * 100 + [2] * 100 + [3] * 100
    assert {placement.local_world_size for placement in agents} == {100}
    rollout = components.get_strategy("rollout").get_placement(topology)
    assert where(rollout) == [(8 + rank // 8, [rank % 8]) for rank in range(64)]
    assert rollout[-1].node_group_label == "4090"
    assert components.placement_mode is PlacementMode.DISAGGREGATED


def test_16_packed_with_a_stride(make_cluster: Make) -> None:
    topology = ClusterTopology.from_config(make_cluster(1, 8))
    strategy = PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2)
    assert where(strategy.get_placement(topology)) == on(0, [0, 2], [1, 3], [4, 6], [5, 7])


@pytest.mark.parametrize(("isolate", "local"), [(True, ("0", "1")), (False, ("2", "4"))])
def test_local_rank_follows_what_a_process_sees(
    make_cluster: Make, place_one: PlaceOne, isolate: bool, local: tuple[str, str]
) -> None:
    cluster = make_cluster(1, 8, placement={"actor": "0-7:0-3"})
    environment = place_one(cluster, isolate_accelerator=isolate)[1].environment()
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == local
    assert environment["CUDA_VISIBLE_DEVICES"] == ("2,3" if isolate else "0,1,2,3,4,5,6,7")
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["NODE_LOCAL_RANK"]) == ("1", "4", "1")
