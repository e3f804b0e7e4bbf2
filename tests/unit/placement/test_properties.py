"""What holds for every valid rank map on every cluster."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from rlinf_core.config.ranks import RankMap
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.resolve import resolve
from rlinf_core.topology import ClusterTopology, NodeInfo


@st.composite
def maps(draw: Any) -> tuple[list[int], str, list[list[int]]]:
    """Accelerators by node, a valid map, and for each process the resources it must get."""
    per_node = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    border = [sum(per_node[: index + 1]) for index in range(len(per_node))]
    parts: list[str] = []
    expected: list[list[int]] = []
    at = 0
    for stop in border:
        while at < stop:
            at += draw(st.integers(0, 2))
            if at >= stop:
                break
            # A part stays on its node, so that shares of several resources never cross a border.
            last = draw(st.integers(at, stop - 1))
            resources = list(range(at, last + 1))
            count, processes = len(resources), len(expected)
            item = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
            sharing = draw(st.integers(1, 3)) if item == 1 else 1
            shares = [resources[i : i + item] for i in range(0, count, item) for _ in range(sharing)]
            expected += shares
            text = f"{at}-{last}" if draw(st.booleans()) or at < last else f"{at}"
            if item == sharing == 1 and draw(st.booleans()):
                parts.append(text)
            else:
                parts.append(f"{text}:{processes}-{len(expected) - 1}")
            at = last + 1
    if not parts:
        parts, expected = ["0"], [[0]]
    return per_node, ",".join(parts), expected


@given(maps())
def test_every_process_gets_its_share_and_every_resource_is_used(case: tuple[list[int], str, list[list[int]]]) -> None:
    per_node, text, expected = case
    topology = ClusterTopology.from_nodes(NodeInfo(rank, count) for rank, count in enumerate(per_node))
    config = {"cluster": {"component_placement": {"actor": text}}}
    components = ComponentPlacement(config, topology)
    placements = components.get_strategy("actor").get_placement(topology)

    assert [placement.rank for placement in placements] == list(range(len(expected)))
    assert components.get_world_size("actor") == len(expected)
    firsts = [sum(per_node[:node]) for node in range(len(per_node))]
    got = [[firsts[p.cluster_node_rank] + unit for unit in p.local_hardware_ranks] for p in placements]
    assert got == expected
    assert components.get_hardware_ranks("actor") == sorted({unit for share in expected for unit in share})

    for node in {placement.cluster_node_rank for placement in placements}:
        here = [placement for placement in placements if placement.cluster_node_rank == node]
        assert [placement.local_rank for placement in here] == list(range(len(here)))
        assert {placement.local_world_size for placement in here} == {len(here)}
        assert len({placement.placement_node_rank for placement in here}) == 1
    order = list(dict.fromkeys(placement.cluster_node_rank for placement in placements))
    assert [order[placement.placement_node_rank] for placement in placements] == [
        placement.cluster_node_rank for placement in placements
    ]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.text(alphabet="0123:-, ", min_size=1, max_size=14))
def test_any_map_is_laid_out_in_full_or_refused(per_node: list[int], text: str) -> None:
    topology = ClusterTopology.from_nodes(NodeInfo(rank, count) for rank, count in enumerate(per_node))
    try:
        rank_map = RankMap.parse(text)
    except PydanticCustomError:
        return
    resolution = resolve("actor", rank_map, (), topology)
    if resolution.problems:
        return
    shares = list(resolution.processes())
    assert len(shares) == resolution.world_size > 0
    covered = [rank for part in rank_map.parts for rank in part.resources or ()]
    assert sorted({rank for share in shares for rank in share}) == covered
    assert resolution.selection is not None
    assert all(
        resolution.selection.locate(share[0]).node == resolution.selection.locate(share[-1]).node for share in shares
    )


def test_a_map_is_resolved_once_on_a_topology() -> None:
    nodes = [NodeInfo(0, 4)]
    topology = ClusterTopology.from_nodes(nodes)
    first = resolve("actor", RankMap.parse("0-3"), (), topology)
    assert resolve("actor", RankMap.parse("0-3"), (), topology) is first
    assert resolve("actor", RankMap.parse("0-3"), (), ClusterTopology.from_nodes(nodes)) is not first
