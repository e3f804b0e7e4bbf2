"""What is wrong with a placement, and properties of every one that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from rlinf_cli.codes import CLOSE, OPEN
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.ranks import RankMap
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.resolve import resolve
from rlinf_core.topology import ClusterTopology, NodeInfo
from tests.unit.placement.found import EIGHT_NODES, findings, one


def test_the_message_of_the_specification() -> None:
    result = one(EIGHT_NODES.format(map="«0-64»"), "placement-out-of-range")
    assert result.message == "component `actor` asks for resource 64, but `a800` has resources 0-63"
    assert result.help == "8 nodes x 8 accelerators; did you mean 0-63?"
    assert result.path == ("cluster", "component_placement", "actor")


@pytest.mark.parametrize(
    "written",
    ['"0-3,«9-64»"', "'0-3, «9-64»'", '["0-3", "«9-64»"]', "[0-3, «9-64»]", "\n        - 0-3\n        - «9-64»"],
)
def test_the_part_is_found_however_the_map_is_written(written: str) -> None:
    diagnostics = [
        diagnostic
        for diagnostic in findings(EIGHT_NODES.format(map=written))
        if diagnostic.code == "placement-out-of-range"
    ]
    text = EIGHT_NODES.format(map=written)
    assert [(diagnostic.span.start, diagnostic.span.end) for diagnostic in diagnostics] == [
        (text.index(OPEN), text.index(CLOSE) - 1)
    ]


@pytest.mark.parametrize(
    ("written", "code", "message", "help"),
    [
        ("«64-127»", "placement-out-of-range", "asks for resources 64-127", "did you mean 0-63?"),
        ("«70-73»", "placement-out-of-range", "asks for resources 70-73", "did you mean 0-3?"),
        ("0-3,«3»,4-63", "placement-not-ascending", "lists resource 3 of `a800` twice", "after a colon"),
        ("8-63,«0-7»", "placement-not-ascending", "lists resources 0-7 after 8-63", "did you mean `0-7,8-63`?"),
        ("0-3,«all»", "placement-not-ascending", "lists resources of `a800` twice", "write it alone"),
        ("«0-63:0-47»", "placement-counts-dont-divide", "puts 48 processes on 64 resources", "`0-63:0-63`"),
        ("«0-63:0-99»", "placement-counts-dont-divide", "puts 100 processes on 64 resources", "`0-63:0-127`"),
        ("«0-63:1-64»", "process-ranks-gap", "starts its process ranks at 1", "did you mean `0-63:0-63`?"),
        ("0-31:0-31,«32-63:40-71»", "process-ranks-gap", "skips process ranks 32-39", "`32-63:32-63`"),
        ("0-31:0-31,«32-63:31-62»", "process-ranks-gap", "lists process rank 31 twice", "`32-63:32-63`"),
        (
            "«4-63:0-4»",
            "process-spans-nodes",
            "gives process 0 the resources 4-15 of `a800`",
            "8 nodes x 8 accelerators",
        ),
    ],
)
def test_what_is_wrong_with_a_map(written: str, code: str, message: str, help: str) -> None:
    result = one(EIGHT_NODES.format(map=f'"{written}"'), code)
    assert message in result.message
    assert "component `actor`" in result.message
    assert help in (result.help or "")


def test_every_mistake_of_a_map_is_reported_in_one_pass() -> None:
    diagnostics = findings(EIGHT_NODES.format(map='"0-3:1-4,2-5,8-15:9-11,60-70"'))
    assert [diagnostic.code for diagnostic in diagnostics] == [
        "process-ranks-gap",
        "placement-not-ascending",
        "placement-counts-dont-divide",
        "placement-out-of-range",
    ]


def test_a_mistyped_group_gets_the_nearest_one() -> None:
    text = EIGHT_NODES.format(map="0-63").replace("node_group: a800", "node_group: «a80»")
    assert one(text, "unknown-node-group").help == "did you mean `a800`?"


def test_one_label_of_several_is_underlined() -> None:
    text = EIGHT_NODES.format(map="0-63").replace("node_group: a800", 'node_group: [a800, "«nodes»"]')
    result = one(text.replace('"«nodes»"', "«nodes»"), "unknown-node-group")
    assert result.help == "did you mean `node`?"


def test_a_group_that_the_file_got_wrong_is_not_called_unknown() -> None:
    assert findings(EIGHT_NODES.format(map="0-63").replace("node_ranks: 0-7", "node_ranks: 7-0")) == []


@pytest.mark.parametrize(
    "change",
    [
        ("per_node: 8", "per_node: eight"),  # accelerators would look undeclared
        ("node_ranks: 0-7", "node_ranks: 0-8"),  # refused by the cluster's own rules
        ("num_nodes: 8", "num_nodes: eight"),
        ("node_group: a800", 'node_group: "a 800"'),  # the entry would look as if it meant every node
    ],
)
def test_what_follows_from_another_mistake_is_not_reported(change: tuple[str, str]) -> None:
    assert findings(EIGHT_NODES.format(map="0-64").replace(*change)) == []


def test_a_component_twice_points_at_the_first_as_well() -> None:
    text = EIGHT_NODES.format(map="0-63").replace("    actor:", '    "rollout, actor":  0-63\n    «actor»:')
    result = one(text, "component-twice")
    (place, _), *_ = result.related
    assert place.text == "actor"
    assert place.begin.line == 5


UNKNOWN = """
cluster:
  num_nodes: 4
  component_placement:
    actor: {{node_group: a, placement: '{map}'}}
  node_groups:
    - label: a
      node_ranks: 0-1
    - label: b
      node_ranks: 2-3
      accelerators: {{per_node: 8}}
"""


def test_unknown_accelerators_are_a_note_beside_other_checks() -> None:
    diagnostics = findings(UNKNOWN.format(map="0-7:0-2,5-6"))
    assert [diagnostic.code for diagnostic in diagnostics] == [
        "placement-counts-dont-divide",
        "placement-not-ascending",
        "accelerators-unknown",
    ]
    assert diagnostics[-1].severity is Severity.NOTE
    assert "nodes 0-1" in diagnostics[-1].message
    assert "--assume a=8" in (diagnostics[-1].help or "")


def test_an_assumption_replaces_the_note() -> None:
    codes = {diagnostic.code for diagnostic in findings(UNKNOWN.format(map="0-16"), ("a=8",))}
    assert codes == {"placement-out-of-range"}


def test_nothing_declared_anywhere_is_not_taken_for_absent() -> None:
    diagnostics = findings("cluster:\n  num_nodes: 2\n  component_placement:\n    «actor»: 0-15\n")
    assert [diagnostic.code for diagnostic in diagnostics] == ["accelerators-unknown"]
    assert "`cluster`" in diagnostics[0].message


@pytest.mark.parametrize("make", [str, lambda text: text.replace("\n", "\r\n")])
def test_line_ends_do_not_move_the_caret(make: Callable[[str], str]) -> None:
    assert one(make(EIGHT_NODES.format(map="«0-64»")), "placement-out-of-range").severity is Severity.ERROR


@pytest.mark.parametrize(
    ("labels", "code"),
    [("«a»x", "unknown-node-group"), ("a, «a»", "groups-overlap"), ("a,«arm»", "groups-mixed-units")],
)
def test_groups_are_checked_before_their_accelerators_are_known(labels: str, code: str) -> None:
    text = UNKNOWN.format(map="0-7").replace("node_group: a,", f'node_group: "{labels}",').replace("«a»x", "«ax»")
    text += """    - label: arm
      node_ranks: 3
      hardware: {type: Franka, configs: [{node_rank: 3, robot_ip: 10.0.0.1}]}
"""
    diagnostics = [diagnostic for diagnostic in findings(text) if diagnostic.severity is Severity.ERROR]
    assert [diagnostic.code for diagnostic in diagnostics] == [code]
    assert diagnostics[0].span.start == text.index(OPEN)


def test_count_that_does_not_fit_is_reported_once() -> None:
    text = EIGHT_NODES.format(map='"«0-1:0-2»,2-3:4-7"')
    errors = [diagnostic for diagnostic in findings(text) if diagnostic.severity is Severity.ERROR]
    assert [error.code for error in errors] == ["placement-counts-dont-divide"]
    assert "did you mean `0-1:0-3`?" in (errors[0].help or "")


def test_a_group_with_one_resource_has_only_that() -> None:
    text = (
        EIGHT_NODES.format(map="«0-1»")
        .replace("per_node: 8", "per_node: 1")
        .replace("node_ranks: 0-7", "node_ranks: 3")
    )
    result = one(text, "placement-out-of-range")
    assert result.message == "component `actor` asks for resource 1, but `a800` has only resource 0"
    assert result.help == "1 node x 1 accelerator; did you mean 0?"


def test_a_name_that_is_missing_is_not_placed_twice() -> None:
    text = "cluster:\n  num_nodes: 1\n  component_placement: {',a': 0, 'b,': 0, ',': 0}\n"
    assert not [diagnostic for diagnostic in findings(text, ("1",)) if diagnostic.code == "component-twice"]


@pytest.mark.parametrize(
    ("groups", "where"), [("", "in a node group"), ("[{label: a, node_ranks: 0}]", "in the group")]
)
def test_unknown_accelerators_are_declared_in_a_group(groups: str, where: str) -> None:
    text = f"cluster:\n  num_nodes: 1\n  component_placement: {{actor: 0}}\n  node_groups: {groups or '[]'}\n"
    (diagnostic,) = findings(text)
    assert diagnostic.code == "accelerators-unknown"
    assert diagnostic.help is not None
    assert where in diagnostic.help
    assert diagnostic.span.text == "actor"


def test_the_whole_cluster_is_never_a_group_of_that_label() -> None:
    groups = "[{label: cluster, node_ranks: 0}]"
    text = f"cluster:\n  num_nodes: 1\n  component_placement: {{actor: 0}}\n  node_groups: {groups}\n"
    assert [diagnostic.span.text for diagnostic in findings(text) if diagnostic.code == "accelerators-unknown"] == [
        "actor"
    ]


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
