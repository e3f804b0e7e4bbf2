"""Laying one tree over another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import split_components
from rlinf_core.config.source import SourceText, Span
from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode, SequenceNode, key_span, merge, to_data

TreeOf = Callable[..., MappingNode]

_SPAN = Span(SourceText("made.yaml", ""), 0, 0)
_DATA = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abcd"), inner, max_size=4)),
    max_leaves=12,
)
_FILES = st.dictionaries(st.sampled_from("abcd"), _DATA, max_size=4)
_PLACEMENT = st.lists(st.sampled_from(["actor", "env", "rollout", "agent"]), unique=True, min_size=1).flatmap(
    lambda names: st.lists(st.booleans(), min_size=len(names), max_size=len(names)).map(
        lambda joins: _joined(names, joins)
    )
)


def _joined(names: list[str], joins: list[bool]) -> list[str]:
    """Keys over `names`: each is joined to the one before it where `joins` says so."""
    keys = [names[0]]
    for name, join in zip(names[1:], joins[1:], strict=True):
        if join:
            keys[-1] += f", {name}"
        else:
            keys.append(name)
    return keys


def node(value: Any) -> Node:
    if isinstance(value, dict):
        return MappingNode(_SPAN, tuple(Entry(ScalarNode(_SPAN, key, key), node(item)) for key, item in value.items()))
    if isinstance(value, list):
        return SequenceNode(_SPAN, tuple(node(item) for item in value))
    return ScalarNode(_SPAN, str(value), value, plain=not isinstance(value, str))


def merged(base: Any, over: Any) -> Any:
    """Return what merging means, on plain data: the independent reference."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    result = copy.copy(base)
    for key, value in over.items():
        result[key] = merged(base[key], value) if key in base else value
    return result


@given(_FILES, _FILES)
def test_it_is_the_deep_merge_of_the_data(base: Any, over: Any) -> None:
    assert to_data(merge(node(base), node(over))) == merged(base, over)


@given(_FILES, _FILES)
def test_it_is_idempotent(base: Any, over: Any) -> None:
    once = merge(node(base), node(over))
    assert to_data(merge(once, node(over))) == to_data(once)


@given(_FILES, _FILES, _FILES)
def test_laying_over_twice_is_laying_over_in_order(first: Any, second: Any, third: Any) -> None:
    """Left to right, as bases of bases are. (A scalar between two mappings makes it not associative in general.)"""
    left = merge(merge(node(first), node(second)), node(third))
    assert to_data(left) == merged(merged(first, second), third)


def placement(keys: list[str], mark: str) -> dict[str, Any]:
    return {"cluster": {"component_placement": {key: f"{mark}-{index}" for index, key in enumerate(keys)}}}


def by_component(tree: Any) -> dict[str, Any]:
    entries = tree["cluster"]["component_placement"]
    return {name.strip(): value for key, value in entries.items() for name in key.split(",")}


def over(base: Node, upper: Node) -> Node:
    """Merge two files as they are read: with an entry for each component."""
    findings = Diagnostics()
    merged = merge(split_components(base, (), findings), split_components(upper, (), findings))
    assert not len(findings)
    return merged


@given(_PLACEMENT, _PLACEMENT)
def test_components_merge_one_by_one_however_they_are_joined(base: list[str], upper: list[str]) -> None:
    low, high = placement(base, "base"), placement(upper, "upper")
    result = to_data(over(node(low), node(high)))
    assert by_component(result) == by_component(low) | by_component(high)


def both(tree_of: TreeOf, base: str, upper: str) -> dict[str, Any]:
    indent = "cluster:\n  component_placement:\n    "
    tree = over(tree_of(indent + base), tree_of(indent + upper))
    data: Any = to_data(tree)
    return data["cluster"]["component_placement"]


@pytest.mark.parametrize(
    ("base", "upper", "result"),
    [
        ("actor,env: 0-3", "actor: 4-7", {"actor": "4-7", "env": "0-3"}),
        ("actor,env: 0-3", "rollout: 4-7", {"actor": "0-3", "env": "0-3", "rollout": "4-7"}),
        ("actor,env: 0-3", "env , actor: 4-7", {"actor": "4-7", "env": "4-7"}),
        ("actor: 0-3", "actor,env: 4-7", {"actor": "4-7", "env": "4-7"}),
        ("actor, env: {node_group: a, placement: 0-3}", "env: {placement: 5}",
         {"actor": {"node_group": "a", "placement": "0-3"}, "env": {"node_group": "a", "placement": 5}}),
        ("actor,env: {node_group: a, placement: 0-3}", "env: 5",
         {"actor": {"node_group": "a", "placement": "0-3"}, "env": 5}),
    ],
)  # fmt: skip
def test_joined_components(tree_of: TreeOf, base: str, upper: str, result: dict[str, Any]) -> None:
    assert both(tree_of, base, upper) == result


def test_joined_keys_elsewhere_are_ordinary_keys(tree_of: TreeOf) -> None:
    tree = over(tree_of("x:\n  actor,env: 1"), tree_of("x:\n  actor: 2"))
    assert to_data(tree) == {"x": {"actor,env": 1, "actor": 2}}


@pytest.mark.parametrize("keys", ["actor: 1\n    actor,env: 2", "env,actor: 1\n    '  actor': 2"])
def test_a_component_that_is_placed_twice_keeps_its_first_place(tree_of: TreeOf, keys: str) -> None:
    findings = Diagnostics()
    data: Any = to_data(split_components(tree_of(f"cluster:\n  component_placement:\n    {keys}"), (), findings))
    assert data["cluster"]["component_placement"]["actor"] == 1
    (finding,) = findings
    ((first, _),) = finding.related
    assert (finding.code, finding.span.text.strip("' "), first.text) == ("component-twice", "actor", "actor")
    assert (finding.span.begin.line, first.begin.line) == (4, 3)


def test_a_split_key_points_at_its_piece(tree_of: TreeOf) -> None:
    base = tree_of("cluster:\n  component_placement:\n    actor, env: 0-3")
    upper = tree_of("cluster:\n  component_placement:\n    actor: 4-7", name="over.yaml")
    tree = over(base, upper)
    env = key_span(tree, ("cluster", "component_placement", "env"))
    actor = key_span(tree, ("cluster", "component_placement", "actor"))
    assert env is not None
    assert (env.text, str(env)) == ("env", "job.yaml:3:12")
    assert actor is not None
    assert str(actor) == "over.yaml:3:5"


def test_keys_and_values_point_at_who_wrote_them_last(tree_of: TreeOf) -> None:
    tree = merge(tree_of("a:\n  x: 1\n  y: 2\n"), tree_of("a:\n  y: 3\n", name="over.yaml"))
    assert isinstance(tree, MappingNode)
    assert [str(key_span(tree, path)) for path in (("a",), ("a", "x"), ("a", "y"))] == [
        "over.yaml:1:1",
        "job.yaml:2:3",
        "over.yaml:2:3",
    ]
