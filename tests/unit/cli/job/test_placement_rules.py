"""Warnings and notes about placements that are legal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.job.placement_rules import overlapping
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.ranks import merge_ranges
from tests.unit.placement.found import EIGHT_NODES, findings


def test_idle_accelerators_are_counted_by_node() -> None:
    diagnostics = findings(EIGHT_NODES.format(map='"0-3,8-61"'))
    assert [diagnostic.code for diagnostic in diagnostics] == ["idle-accelerators"]
    assert diagnostics[0].message == ("6 accelerators of `a800` are used by no component: 4-7 on node 0, 6-7 on node 7")


def test_nodes_that_nothing_is_placed_on_are_told_of() -> None:
    text = (
        "cluster:\n  num_nodes: 5\n  component_placement: {env: {node_group: sim, placement: PLACES}}\n"
        "  node_groups:\n    - {label: sim, node_ranks: 1-3, accelerators: {per_node: 0}}\n"
        "    - {label: spare, node_ranks: 3-4, accelerators: {per_node: 0}}\n"
    )
    first, second = findings(text.replace("PLACES", "0"))
    assert (first.code, first.severity, first.span.text) == ("idle-nodes", Severity.WARNING, "sim")
    assert first.message == "no process is placed on nodes 2-3 of `sim`"
    # A node of two groups is told of once.
    assert second.message == "no process is placed on node 4 of `spare`"
    assert [finding.span.text for finding in findings(text.replace("PLACES", "0-2"))] == ["spare"]


def test_idle_nodes_in_no_group_are_reported() -> None:
    text = (
        "cluster:\n  num_nodes: 4\n  component_placement: {env: {node_group: GROUP, placement: 0}}\n"
        "  node_groups:\n    - {label: sim, node_ranks: 1, accelerators: {per_node: 0}}\n"
    )
    (idle,) = findings(text.replace("GROUP", "sim"))
    assert (idle.code, idle.span.text) == ("idle-nodes", "4")
    assert idle.message == "no process is placed on nodes 2-3 (in no node group)"
    # Accelerators that a component counts are unknown: they may be on any node.
    assert "idle-nodes" not in [finding.code for finding in findings(text.replace("GROUP", "cluster"))]


def test_robots_that_nothing_is_placed_on_are_told_of() -> None:
    arms = "{type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.1}]}"
    text = (
        "cluster:\n  num_nodes: 2\n  component_placement: {env: {node_group: LABEL, placement: 0}}\n"
        f"  node_groups: [{{label: arms, node_ranks: 1, hardware: {arms}}}]\n"
    )
    assert [diagnostic.code for diagnostic in findings(text.replace("LABEL", "arms"))] == []
    (idle,) = findings(text.replace("LABEL", "node"))
    assert (idle.code, idle.severity, idle.span.text) == ("idle-robots", Severity.WARNING, "arms")


def test_robots_and_nodes_do_not_make_accelerators_idle_twice() -> None:
    text = EIGHT_NODES.format(map="0-31").replace(
        "  node_groups:\n", "    agent: {node_group: node, placement: '0-7:0-799'}\n  node_groups:\n"
    )
    (note, idle) = sorted(findings(text), key=lambda item: item.severity is Severity.WARNING)
    assert idle.code == "idle-accelerators"
    assert (note.code, note.severity) == ("accelerators-not-reserved", Severity.NOTE)
    expected = "`agent` sees all accelerators of nodes 0-3, none reserved for it; `actor` holds some of them"
    assert note.message == expected


def test_env_configs_that_do_not_reach_a_component_are_noted() -> None:
    text = """\
cluster:
  num_nodes: 3
  component_placement:
    env: {node_group: node, placement: 0-2}
    actor: {node_group: a, placement: 0-1}
  node_groups:
    - {label: a, node_ranks: 0-1, ENV, env_configs: [{node_ranks: 0, env_vars: {A: 1}}]}
    - {label: b, node_ranks: 1-2, ENV, env_configs: [{node_ranks: 1-2, python_interpreter_path: /b}]}
""".replace("ENV", "accelerators: {per_node: 0}")
    results = {diagnostic.code: diagnostic for diagnostic in findings(text)}
    # Node 1 is in two groups: nobody would take the variables of either for those of the node. `actor` goes
    # through `a`: the file tells the two apart.
    messages = [diagnostic.message for diagnostic in findings(text) if diagnostic.code == "env-configs-unused"]
    assert messages == ["`env` is placed through `node`: the `env_configs` of `b` on node 2 do not apply"]
    assert results["env-configs-unused"].severity is Severity.NOTE
    assert (
        results["unused-interpreter"].message == "`b` places no process on nodes 1-2, for which it sets an interpreter"
    )


@pytest.mark.parametrize("other", ["0-63:0-63", "0-63:0-31"])
def test_components_of_like_density_are_not_suspicious(other: str) -> None:
    text = EIGHT_NODES.format(map="0-63").replace("  node_groups:\n", f"    env: '{other}'\n  node_groups:\n")
    assert findings(text) == []


def test_a_component_within_another_is_not_suspicious() -> None:
    text = EIGHT_NODES.format(map="0-63").replace(
        "  node_groups:\n", "    env: 0-31\n    rollout: 32-63\n  node_groups:\n"
    )
    assert findings(text) == []


ON_NUMBERS = "cluster:\n  num_nodes: 2\n  component_placement: {{actor: {map}}}\n  node_groups: [{group}]\n"


@pytest.mark.parametrize(
    ("map", "group", "code"),
    [
        ("0-1", "{label: a, node_ranks: 0}", "no-accelerator-found"),
        ("{node_group: a, placement: 0}", "{label: a, node_ranks: 0}", "no-accelerator-found"),
        ("0-3", "{label: a, node_ranks: 0}", "placement-out-of-range"),
        ("all", "{label: a, node_ranks: 0}", None),
        ("{node_group: node, placement: 0-1}", "{label: a, node_ranks: 0}", None),
        ("{node_group: a, placement: 0}", "{label: a, node_ranks: 0, ignore_hardware: true}", None),
        ("0-1", "{label: a, node_ranks: all, accelerators: {per_node: 0}}", None),
        ("{node_group: a, placement: 0}", "{label: a, node_ranks: 0, accelerators: {per_node: 0}}", None),
    ],
)
def test_unused_accelerators_are_reported_unless_declared(map: str, group: str, code: str | None) -> None:
    text = ON_NUMBERS.format(map=map, group=group)
    # Node 1 is idle where `a` alone is used.
    diagnostics = [diagnostic for diagnostic in findings(text, accelerators=0) if diagnostic.code != "idle-nodes"]
    assert [diagnostic.code for diagnostic in diagnostics] == ([code] if code else [])
    assert all("no accelerator found" in f"{diagnostic.message} {diagnostic.help}" for diagnostic in diagnostics)
    # Before the nodes were asked nobody can know.
    assert "no-accelerator-found" not in {diagnostic.code for diagnostic in findings(text)}


piece_lists = st.lists(st.builds(range, st.integers(0, 40), st.integers(0, 40)), max_size=6).map(merge_ranges)


@given(st.lists(piece_lists, max_size=5))
def test_overlapping(lists: list[tuple[range, ...]]) -> None:
    sets = [{number for piece in pieces for number in piece} for pieces in lists]
    expected = [(i, j) for j in range(len(sets)) for i in range(j) if sets[i] & sets[j]]
    assert overlapping(lists) == sorted(expected)


@pytest.mark.parametrize(
    ("placement", "meant"),
    [("[0, 63]", "0-63"), ("'0,63'", "0-63"), ("[8, 15]", "8-15"), ("[0, 1]", None), ("[0, 7, 63]", None)],
)
def test_two_ends_of_a_range_suggest_the_range(placement: str, meant: str | None) -> None:
    (idle,) = findings(EIGHT_NODES.format(map=placement))
    assert idle.code == "idle-accelerators"
    begins = f"`actor` is placed on two accelerators: did you mean `{meant}`? Otherwise " if meant else ""
    assert idle.help == f"{begins}place a component on them, or remove the nodes"


def test_resources_counted_from_one_are_shifted() -> None:
    finding = next(finding for finding in findings(EIGHT_NODES.format(map="1-64")) if finding.help)
    assert (finding.help or "").endswith("; ranks begin at 0; did you mean 0-63?")
