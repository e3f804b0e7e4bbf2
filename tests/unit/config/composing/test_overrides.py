"""Arguments of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.composing.origins import inline
from rlinf_core.config.composing.overrides import apply_overrides, parse_overrides
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.reading import decode, read, split_components
from rlinf_core.config.source import OVERRIDES_NAME
from rlinf_core.config.tree import MappingNode, find, format_path, key_span, to_data

TreeOf = Callable[..., MappingNode]

FILE = """\
cluster:
  num_nodes: 2
  component_placement:
    actor,env: 0-3
    rollout: {node_group: a800, placement: 0-7}
  node_groups:
    - {label: a800, node_ranks: 0}
    - {label: 4090, node_ranks: 1}
  ports:
"""
_KEYS = st.text(st.characters(exclude_categories=["C"]), max_size=6)


def applied(tree: MappingNode, *arguments: str) -> tuple[MappingNode, Diagnostics]:
    diagnostics = Diagnostics()
    _, overrides = parse_overrides(arguments, diagnostics)
    tree = cast("MappingNode", split_components(tree, (), diagnostics))
    return apply_overrides(tree, overrides, diagnostics), diagnostics


def overridden(tree: MappingNode, *arguments: str) -> Any:
    tree, changed = applied(tree, *arguments)
    assert not list(changed)
    return to_data(tree)


def refused(tree: MappingNode, argument: str) -> Diagnostic:
    after, changed = applied(tree, argument)
    (problem,) = changed
    assert to_data(after) == to_data(applied(tree)[0])
    assert problem.span.source.kind == "overrides"
    return problem


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("cluster.num_nodes=4", ("cluster", "num_nodes"), 4),
        ("runner.logger.log_path=out", ("runner", "logger", "log_path"), "out"),
        ("cluster.node_groups[1].label=h100", ("cluster", "node_groups", 1, "label"), "h100"),
        ("cluster.node_groups=[]", ("cluster", "node_groups"), []),
        ("cluster.ports.low=1", ("cluster", "ports"), {"low": 1}),
        ("a=", ("a",), None),
        ("a=  ", ("a",), None),
        ("a=[1, {b: c}]", ("a",), [1, {"b": "c"}]),
        ("a={b: 1, c: [x]}", ("a",), {"b": 1, "c": ["x"]}),
        ('a."b.c"=true', ("a", "b.c"), True),
        ("a='5'", ("a",), "5"),
        ("a=x=y", ("a",), "x=y"),
        ("a=0-3,5", ("a",), "0-3,5"),
        ("a=1e-4", ("a",), 1e-4),
        ("cluster.num_nodes={a: 1}", ("cluster", "num_nodes"), {"a": 1}),
        ("cluster.node_groups[0]=x", ("cluster", "node_groups", 0), "x"),
    ],
)
def test_setting(tree_of: TreeOf, argument: str, path: tuple[str | int, ...], value: Any) -> None:
    tree, changed = applied(tree_of(FILE), argument)
    node = find(tree, path)
    assert not list(changed)
    assert node is not None
    assert to_data(node) == value


def test_a_mapping_is_laid_over_what_is_there(tree_of: TreeOf) -> None:
    data = overridden(tree_of("optim: {lr: 1, eps: 2}\n"), "optim={lr: 3}")
    assert data == {"optim": {"lr": 3, "eps": 2}}


def test_deleting_first_replaces_a_mapping(tree_of: TreeOf) -> None:
    data = overridden(tree_of("optim: {lr: 1, eps: 2}\n"), "~optim", "optim={lr: 3}")
    assert data == {"optim": {"lr": 3}}


def test_deleting(tree_of: TreeOf) -> None:
    data = overridden(
        tree_of(FILE), "~cluster.num_nodes", "~cluster.node_groups[0]", "~cluster.component_placement.rollout.placement"
    )
    assert data["cluster"]["node_groups"] == [{"label": 4090, "node_ranks": 1}]
    assert data["cluster"]["component_placement"]["rollout"] == {"node_group": "a800"}
    assert "num_nodes" not in data["cluster"]


@pytest.mark.parametrize(
    ("arguments", "placement"),
    [
        (["{}.actor=4-7"], {"actor": "4-7", "env": "0-3"}),
        (["{}.actor,env=4-7"], {"actor": "4-7", "env": "4-7"}),
        (['{}."env, actor"=4-7'], {"actor": "4-7", "env": "4-7"}),
        (["{}={{'env, actor': 4-7}}"], {"actor": "4-7", "env": "4-7"}),
        (['{}."actor,agent"=4-7'], {"actor": "4-7", "env": "0-3", "agent": "4-7"}),
        (["{}.agent=4-7"], {"actor": "0-3", "env": "0-3", "agent": "4-7"}),
        (['{}."agent,data"=4-7'], {"actor": "0-3", "env": "0-3", "agent": "4-7", "data": "4-7"}),
        (["{}={{actor: 4-7}}"], {"actor": "4-7", "env": "0-3"}),
        (["~{}.actor"], {"env": "0-3"}),
        (["~{}.actor,env"], {}),
        (
            ["{}.env={{placement: 1}}", "{}.env.node_group=x"],
            {"actor": "0-3", "env": {"placement": 1, "node_group": "x"}},
        ),
    ],
)
def test_components_are_reached_in_joined_keys(
    tree_of: TreeOf, arguments: list[str], placement: dict[str, Any]
) -> None:
    at = "cluster.component_placement"
    data = overridden(tree_of(FILE), f"~{at}.rollout", *(argument.format(at) for argument in arguments))
    assert data["cluster"]["component_placement"] == placement


def test_a_joined_key_shared_by_both_overrides_each(tree_of: TreeOf) -> None:
    tree = tree_of("cluster: {component_placement: {actor: {placement: 1}, env: {node_group: a, placement: 2}}}\n")
    data = overridden(tree, 'cluster.component_placement."actor,env".placement=3')
    placement = data["cluster"]["component_placement"]
    assert placement == {"actor": {"placement": 3}, "env": {"node_group": "a", "placement": 3}}


def test_a_part_that_is_set_later_shadows_no_joined_key(tree_of: TreeOf) -> None:
    at = "cluster.component_placement"
    _, findings = applied(tree_of(FILE), f"{at}.actor,env=4-7", f"{at}.actor=1")
    assert not list(findings)


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_wrong_part_of_a_joined_key_is_underlined(tree_of: TreeOf, quote: str) -> None:
    _, (finding,) = applied(tree_of(FILE), f"~cluster.component_placement.{quote}actor,agent{quote}")
    assert (finding.code, finding.span.text) == ("override-path", "agent")


def test_places_are_in_the_arguments(tree_of: TreeOf) -> None:
    tree, _ = applied(tree_of(FILE), "a.b=1", "cluster.num_nodes=[7, 8]")
    key, value = key_span(tree, ("cluster", "num_nodes")), find(tree, ("cluster", "num_nodes", 1))
    created = key_span(tree, ("a",))
    section = key_span(tree, ("cluster",))
    assert key is not None
    assert value is not None
    assert created is not None
    assert section is not None
    assert (str(key), key.text) == (f"{OVERRIDES_NAME}:2:9", "num_nodes")
    assert (str(value.span), value.span.text) == (f"{OVERRIDES_NAME}:2:23", "8")
    assert (str(created), created.text) == (f"{OVERRIDES_NAME}:1:1", "a")
    assert section.source.kind == "file"


@pytest.mark.parametrize(
    ("argument", "code", "underlined", "words"),
    [
        ("cluster", "override-syntax", "cluster", "no `=`"),
        ("", "override-syntax", "", "missing"),
        ("=3", "override-syntax", "=", "missing"),
        ("a b=3", "override-syntax", " ", "not valid here"),
        ("a[0=3", "override-syntax", "[0=3", "never closed"),
        ("~cluster.num_nodes=3", "override-syntax", "=3", "deletes"),
        ("a=1\nb=2", "override-syntax", "\N{REPLACEMENT CHARACTER}", "line end"),
        ("a=\x1b[31m", "override-syntax", "\N{REPLACEMENT CHARACTER}", "control character"),
        ("a=\udcff", "override-syntax", "\N{REPLACEMENT CHARACTER}", "not UTF-8"),
        ("+a=1", "override-plus", "+", "`+`"),
        ("++a.b=1", "override-plus", "++", "`++`"),
        ("a={b:1,c:2}", "override-value", "b:1", "one word"),
        ("a=[{b:1}]", "override-value", "b:1", "one word"),
        ("extends=other.yaml", "override-path", "extends", "extends"),
        ("cluster.num_nodes.x=1", "override-path", "x", "single value"),
        ("cluster.node_groups.label=1", "override-path", "label", "is a list"),
        ("cluster.node_groups.0.label=1", "override-path", "0", "is a list"),
        ("cluster.node_groups[2].label=1", "override-path", "[2]", "`[0]` to `[1]`"),
        ("cluster.num_nodes[0]=1", "override-path", "[0]", "is not a list"),
        ("cluster.component_placement[0]=1", "override-path", "[0]", "is not a list"),
        ("nothing[0]=1", "override-path", "[0]", "is not set"),
        ("~cluster.num_node", "override-path", "num_node", "no `cluster.num_node` to delete"),
        ("~x.y.z", "override-path", "x", "no `x` to delete"),
        ("~cluster.component_placement.agent", "override-path", "agent", "to delete"),
        (".".join("a" * 60) + "=1", "override-path", ".".join("a" * 10), "at most 50"),
    ],
)
def test_what_is_refused(tree_of: TreeOf, argument: str, code: str, underlined: str, words: str) -> None:
    problem = refused(tree_of(FILE), argument)
    assert (problem.code, problem.span.text) == (code, underlined)
    assert words in problem.message


def test_hints(tree_of: TreeOf) -> None:
    tree = tree_of(FILE)
    assert refused(tree, "++a.b=1").help == "write `a.b=1`: keys missing from the file can be set like any other"
    assert refused(tree, "~cluster.num_node").help == "did you mean `num_nodes`?"
    assert refused(tree, "cluster.node_groups.0.label=1").help == "its items are `cluster.node_groups[0]`, ..."
    assert refused(tree, "a={lr:1e-4}").help == "write a space after the colon: `lr: 1e-4`"


def test_a_key_of_a_reference_is_not_overridden_behind_its_back(tree_of: TreeOf) -> None:
    problem = refused(tree_of("a: ${b}\nb: {x: 1}\n"), "a.x=2")
    assert problem.code == "override-path"
    assert "`${b}`" in problem.message


def test_bad_yaml_is_reported_and_other_arguments_apply(tree_of: TreeOf) -> None:
    tree, changed = applied(tree_of(FILE), "a=[1, 2", "b=3")
    (problem,) = changed
    assert problem.span.begin.line == 1
    assert find(tree, ("a",)) is None
    assert find(tree, ("b",)) is not None


@pytest.mark.parametrize(
    ("arguments", "shadowed"),
    [
        (["a.b=1", "a.b=2"], ["a.b=1"]),
        (["a.b=1", "c=1", "a=2"], ["a.b=1"]),
        (["a.b=1", "~a"], ["a.b=1"]),
        (["a.b=1", "a.c=2"], []),
        (["a={x: 1}", "a={y: 1}"], []),
        (["a=1", "a.b=2"], []),
        (["~cluster.num_nodes", "cluster.num_nodes=2"], []),
    ],
)
def test_an_override_without_effect_is_a_warning(tree_of: TreeOf, arguments: list[str], shadowed: list[str]) -> None:
    diagnostics = Diagnostics()
    parse_overrides(arguments, diagnostics)
    assert [d.span.text for d in diagnostics if d.code == "override-shadowed"] == shadowed
    assert diagnostics.ok


def test_the_last_of_two_wins(tree_of: TreeOf) -> None:
    tree, _ = applied(tree_of(FILE), "cluster.num_nodes=5", "cluster.num_nodes=6")
    assert to_data(tree)["cluster"]["num_nodes"] == 6  # type: ignore[index, call-overload]


def test_no_arguments_are_no_source() -> None:
    assert parse_overrides([], Diagnostics()) == (None, [])


def _empty_tree() -> MappingNode:
    diagnostics = Diagnostics()
    source = decode("job.yaml", FILE.encode(), diagnostics)
    assert source is not None
    tree = read(source, diagnostics)
    assert tree is not None
    return tree


@given(st.lists(_KEYS, min_size=1, max_size=5), st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False)))
def test_what_is_set_is_found(keys: list[str], value: Any) -> None:
    path = ("new section", *keys)
    tree, changed = applied(_empty_tree(), f"{format_path(path)}={inline(value)}")
    assert not list(changed)
    node = find(tree, path)
    assert node is not None
    assert to_data(node) == value


@given(st.lists(st.one_of(st.text(), st.text(alphabet="~+cluster.num_nodes[0]=\"'{}:, \n\t"))))
def test_no_argument_whatever_raises(arguments: list[str]) -> None:
    source, overrides = parse_overrides(arguments, diagnostics := Diagnostics())
    apply_overrides(_empty_tree(), overrides, diagnostics)
    assert source is None or len(source.text.split("\n")) == len(arguments)
    assert all(0 <= d.span.start <= d.span.end <= len(d.span.source.text) for d in diagnostics)


@given(st.text(alphabet="abcnum_des.=[]{}\"'${}:-,&*!|>%@`#\t ~", max_size=30))
def test_no_value_whatever_raises(value: str) -> None:
    for argument in (f"a={value}", f"cluster.component_placement={{{value}}}", f"cluster.node_groups{value}=1"):
        _, diagnostics = applied(_empty_tree(), argument)
        assert all(0 <= d.span.start <= d.span.end <= len(d.span.source.text) for d in diagnostics)
