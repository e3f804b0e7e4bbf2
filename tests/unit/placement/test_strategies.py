"""The public strategies: which resources each process gets, and what they refuse."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import PlacementError
from rlinf_core.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    default_strategy,
)
from rlinf_core.placement.strategy import Placement
from rlinf_core.topology import ClusterTopology, NodeInfo

TWO_BY_EIGHT = ClusterTopology.from_nodes([NodeInfo(0, 8, "NVIDIA"), NodeInfo(1, 8, "NVIDIA")])
CPU = ClusterTopology.from_nodes([NodeInfo(0, 0), NodeInfo(1, 0)])


def units(placements: list[Placement]) -> list[tuple[int, tuple[int, ...]]]:
    return [(placement.cluster_node_rank, placement.local_hardware_ranks) for placement in placements]


def test_packed_takes_consecutive_resources_over_nodes() -> None:
    strategy = PackedPlacementStrategy(4, 11, num_hardware_per_process=2)
    assert units(strategy.get_placement(TWO_BY_EIGHT)) == [(0, (4, 5)), (0, (6, 7)), (1, (0, 1)), (1, (2, 3))]


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_packed_always_takes_the_lowest_unused(start: int, per_process: int, stride: int, blocks: int) -> None:
    count = blocks * per_process * stride
    topology = ClusterTopology.from_nodes([NodeInfo(0, start + count)])
    strategy = PackedPlacementStrategy(start, start + count - 1, per_process, stride)
    unused = list(range(start, start + count))
    for placement in strategy.get_placement(topology):
        first = min(unused)
        assert list(placement.local_hardware_ranks) == [first + stride * i for i in range(per_process)]
        unused = [rank for rank in unused if rank not in placement.local_hardware_ranks]
    assert unused == []


@pytest.mark.parametrize(
    ("arguments", "message", "help"),
    [
        ((0, 6, 2), "7 resources, 0-6, cannot be divided into shares of 2", "did you mean 0-5?"),
        ((0, 5, 2, 2), "into shares of 2 with stride 2", "multiple of 4; did you mean 0-3?"),
        ((0, 1, 4), "cannot be divided", "multiple of 4"),
        ((3, 2), "3 to 2 is not a range", "first and the last"),
        ((-1, 2), "-1 to 2 is not a range", "from 0"),
        ((0, 7, 0), "`num_hardware_per_process` is 0", ">= 1"),
        ((0, 7, 2, 0), "`stride` is 0", ">= 1"),
    ],
)
def test_packed_refuses_what_does_not_fit(arguments: tuple[int, ...], message: str, help: str) -> None:
    with pytest.raises(PlacementError) as caught:
        PackedPlacementStrategy(*arguments)
    assert message in caught.value.message
    assert help in (caught.value.help or "")
    assert "PackedPlacementStrategy" in (caught.value.where or "")


def test_flexible_gives_each_process_its_list_in_the_order_given() -> None:
    placements = FlexiblePlacementStrategy([[3, 1], [9], [9, 8]]).get_placement(TWO_BY_EIGHT)
    assert units(placements) == [(0, (3, 1)), (1, (1,)), (1, (1, 0))]
    assert [placement.local_accelerator_rank for placement in placements] == [3, 1, 1]
    assert placements[0].environment()["CUDA_VISIBLE_DEVICES"] == "3,1"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "nothing to place"),
        ([[0], []], "process 1 has no resource"),
        ([[-1]], "process 0 has resource -1"),
    ],
)
def test_flexible_refuses_lists_that_say_nothing(ranks: list[list[int]], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        FlexiblePlacementStrategy(ranks)
    with pytest.raises(PlacementError, match="the list names no node group"):
        FlexiblePlacementStrategy([[0]], [])


@pytest.mark.parametrize(
    ("ranks", "message", "help"),
    [
        ([[0], [16]], "process 1 asks for resource 16, but `cluster` has resources 0-15", "2 nodes x 8 accelerators"),
        ([[7, 8]], "process 0 would hold resources 7,8 of `cluster`, which are on nodes 0-1", "one node"),
        ([[1, 2, 1]], "process 0 has resource 1 twice", "once"),
    ],
)
def test_flexible_refuses_what_the_cluster_cannot_hold(ranks: list[list[int]], message: str, help: str) -> None:
    with pytest.raises(PlacementError) as caught:
        FlexiblePlacementStrategy(ranks).get_placement(TWO_BY_EIGHT)
    assert caught.value.message == message
    assert help in (caught.value.help or "")


def test_node_places_one_process_an_entry() -> None:
    placements = NodePlacementStrategy([1, 0, 1]).get_placement(TWO_BY_EIGHT)
    assert [placement.cluster_node_rank for placement in placements] == [1, 0, 1]
    assert [placement.placement_node_rank for placement in placements] == [0, 1, 0]
    assert [(placement.local_rank, placement.local_world_size) for placement in placements] == [(0, 2), (0, 1), (1, 2)]
    environment = placements[2].environment()
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert environment["NODE_RANK"] == "0"
    # It keeps the variable of its node, and so sees all that the node shows.
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert placements[2].visible_accelerators == tuple(range(8))
    assert placements[2].local_accelerator_rank is None


def test_node_takes_several_groups_like_its_siblings(make_cluster: Callable[..., ClusterConfig]) -> None:
    groups = [{"label": label, "node_ranks": ranks} for label, ranks in (("a", "0,3"), ("b", "1-2"), ("c", "2-3"))]
    topology = ClusterTopology.from_config(make_cluster(4, groups=groups))
    for labels in (["b", "a"], ("b", "a"), "b,a"):
        placements = NodePlacementStrategy([0, 2, 3], node_group_label=labels).get_placement(topology)
        assert [(placement.cluster_node_rank, placement.node_group_label) for placement in placements] == [
            (1, "b"),
            (0, "a"),
            (3, "a"),
        ]
    with pytest.raises(PlacementError, match="process 0 asks for node 4, but `b`, `a` have nodes 0-3"):
        NodePlacementStrategy([4], ["b", "a"]).get_placement(topology)
    with pytest.raises(PlacementError, match="the node groups `b`, `c` share nodes"):
        NodePlacementStrategy([0], ["b", "c"]).get_placement(topology)


@pytest.mark.parametrize(("per_process", "stride"), [(1, 3), (1, 16), (2, 3), (3, 1), (2, 8)])
def test_a_stride_or_count_that_does_not_fit_is_refused(per_process: int, stride: int) -> None:
    with pytest.raises(PlacementError, match="8 resources, 0-7, cannot be divided"):
        PackedPlacementStrategy(0, 7, per_process, stride)


def test_stride_of_one_resource_per_process_changes_nothing() -> None:
    plain, strided = (PackedPlacementStrategy(0, 7, stride=stride).get_placement(TWO_BY_EIGHT) for stride in (1, 4))
    assert plain == strided


def test_node_counts_within_a_group(make_cluster: Callable[..., ClusterConfig]) -> None:
    topology = ClusterTopology.from_config(make_cluster(4, groups=[{"label": "b", "node_ranks": "1,3"}]))
    placements = NodePlacementStrategy([0, 1], "b").get_placement(topology)
    assert [placement.cluster_node_rank for placement in placements] == [1, 3]
    assert {placement.node_group_label for placement in placements} == {"b"}
    for label, nodes, help in (("b", "0-1", "ranks count the nodes of the groups, from 0"), ("node", "0-3", None)):
        with pytest.raises(
            PlacementError, match=f"process 0 asks for node 7, but `{label}` has nodes {nodes}"
        ) as caught:
            NodePlacementStrategy([7], label).get_placement(topology)
        assert caught.value.help == help


def test_node_refuses_no_processes() -> None:
    with pytest.raises(PlacementError, match="nothing to place"):
        NodePlacementStrategy([])


@pytest.mark.parametrize(("topology", "expected"), [(TWO_BY_EIGHT, 16), (CPU, 2)])
def test_the_default_is_a_process_an_accelerator_or_else_a_node(topology: ClusterTopology, expected: int) -> None:
    placements = default_strategy(topology).get_placement(topology)
    assert len(set(units(placements))) == len(placements) == expected


@pytest.mark.parametrize("strategy", [PackedPlacementStrategy(0, 1), FlexiblePlacementStrategy([[0], [1]])])
def test_a_cluster_is_as_good_as_its_topology(strategy: Any) -> None:
    @dataclass
    class Cluster:
        topology: ClusterTopology

    assert strategy.get_placement(Cluster(TWO_BY_EIGHT)) == strategy.get_placement(TWO_BY_EIGHT)


def test_without_isolation_a_process_sees_its_whole_node() -> None:
    placements = PackedPlacementStrategy(4, 9, 2).get_placement(TWO_BY_EIGHT, isolate_accelerator=False)
    assert [placement.visible_accelerators for placement in placements] == [tuple(range(8))] * 3
    assert [placement.environment()["LOCAL_RANK"] for placement in placements] == ["4", "6", "0"]
    assert [placement.environment()["LOCAL_WORLD_SIZE"] for placement in placements] == ["2", "2", "1"]


@pytest.mark.parametrize(
    ("vendor", "variable"),
    [
        ("NVIDIA", "CUDA_VISIBLE_DEVICES"),
        ("AMD", "HIP_VISIBLE_DEVICES"),
        ("Ascend", "ASCEND_RT_VISIBLE_DEVICES"),
        (None, "CUDA_VISIBLE_DEVICES"),
        ("none", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_each_vendor_has_its_own_visibility_variable(vendor: str | None, variable: str) -> None:
    topology = ClusterTopology.from_nodes([NodeInfo(0, 2, vendor)])
    assert FlexiblePlacementStrategy([[1]]).get_placement(topology)[0].environment()[variable] == "1"


def test_the_node_names_its_devices() -> None:
    topology = ClusterTopology.from_nodes([NodeInfo(0, 2, "NVIDIA", accelerator_ids=("5", "GPU-7c3a"))])
    (placement,) = FlexiblePlacementStrategy([[1]]).get_placement(topology)
    assert placement.visible_accelerators == (1,)
    assert placement.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-7c3a"


def test_unknown_accelerators_are_refused_with_what_to_do() -> None:
    topology = ClusterTopology.from_nodes([NodeInfo(0)])
    with pytest.raises(PlacementError, match="the accelerators of `cluster` are unknown") as caught:
        PackedPlacementStrategy(0, 0).get_placement(topology)
    assert "--assume" in (caught.value.help or "")


def test_a_placement_is_a_frozen_value_that_travels() -> None:
    placement = PackedPlacementStrategy(0, 0).get_placement(TWO_BY_EIGHT)[0]
    assert pickle.loads(pickle.dumps(placement)) == placement
    with pytest.raises(FrozenInstanceError):
        placement.rank = 1  # type: ignore[misc]


# A caller writes without types: a script, a notebook.
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackedPlacementStrategy("0", 1), "`start_hardware_rank` is '0'"),
        (lambda: PackedPlacementStrategy(0, None), "`end_hardware_rank` is None"),
        (lambda: PackedPlacementStrategy(0, 7, True), "`num_hardware_per_process` is True"),
        (lambda: PackedPlacementStrategy(0, 7, 2, 1.5), "`stride` is 1.5"),
        (lambda: FlexiblePlacementStrategy("0,1"), "`hardware_ranks_list` is '0,1'"),
        (lambda: FlexiblePlacementStrategy(None), "`hardware_ranks_list` is None"),
        (lambda: FlexiblePlacementStrategy([0, 1]), "the resources of process 0 are 0"),
        (lambda: FlexiblePlacementStrategy([[0], ["1"]]), "the resources of process 1 are ['1']"),
        (lambda: NodePlacementStrategy("0"), "`node_ranks` are '0'"),
        (lambda: NodePlacementStrategy(3), "`node_ranks` are 3"),
        (lambda: NodePlacementStrategy([0, 1.0]), "`node_ranks` are [0, 1.0]"),
        (lambda: NodePlacementStrategy([0]).get_placement(None), "None is not a cluster"),
        (lambda: PackedPlacementStrategy(0, 0, node_group=2.5).get_placement(CPU), "group `2.5`, which does not exist"),
    ],
)
def test_what_is_no_rank_is_refused_in_our_words(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make()
    assert message in str(caught.value)


def test_ranks_may_be_of_any_kind_of_whole_number() -> None:
    np = pytest.importorskip("numpy")
    assert NodePlacementStrategy(np.arange(2)).node_ranks == (0, 1)
    assert units(FlexiblePlacementStrategy(np.array([[0, 1], [8, 9]])).get_placement(TWO_BY_EIGHT)) == [
        (0, (0, 1)),
        (1, (0, 1)),
    ]
    assert units(PackedPlacementStrategy(np.int64(0), np.int32(1)).get_placement(TWO_BY_EIGHT)) == [
        (0, (0,)),
        (0, (1,)),
    ]
