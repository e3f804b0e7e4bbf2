"""Arguments of the command line, and where values come from."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from ruamel.yaml import YAML

from rlinf_core.config.composing.origins import inline, origins, resolved_text
from rlinf_core.config.composing.overrides import apply_overrides, parse_overrides
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.reading import split_components
from rlinf_core.config.secrets import MASK, mask
from rlinf_core.config.tree import (
    OVERRIDES_NAME,
    Entry,
    MappingNode,
    ScalarNode,
    SequenceNode,
    SourceText,
    Span,
    find,
    format_path,
    key_span,
    to_data,
)
from tests.unit.config.texts import composing, tree_of

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
        ("a.'b.c'.4090.b-c=true", ("a", "b.c", "4090", "b-c"), True),
        ("a='5'", ("a",), "5"),
        ("a=x=y", ("a",), "x=y"),
        ("a=x#y", ("a",), "x#y"),
        ("a=b: ", ("a",), {"b": None}),
        ("a='x #y'", ("a",), "x #y"),
        ("a=0-3,5", ("a",), "0-3,5"),
        ("a=1e-4", ("a",), 1e-4),
        ("cluster.num_nodes={a: 1}", ("cluster", "num_nodes"), {"a": 1}),
        ("cluster.node_groups[0]=x", ("cluster", "node_groups", 0), "x"),
    ],
)
def test_setting(argument: str, path: tuple[str | int, ...], value: Any) -> None:
    tree, changed = applied(tree_of(FILE), argument)
    node = find(tree, path)
    assert not list(changed)
    assert node is not None
    assert to_data(node) == value


@pytest.mark.parametrize(
    ("arguments", "optim"),
    [
        (["optim={lr: 3}"], {"lr": 3, "eps": 2}),
        (["~optim", "optim={lr: 3}"], {"lr": 3}),
        (["optim={lr: 5}", "optim={lr: 6}"], {"lr": 6, "eps": 2}),
    ],
)
def test_a_mapping_is_laid_over_what_is_there(arguments: list[str], optim: dict[str, int]) -> None:
    assert overridden(tree_of("optim: {lr: 1, eps: 2}\n"), *arguments) == {"optim": optim}


def test_deleting() -> None:
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
def test_components_are_reached_in_joined_keys(arguments: list[str], placement: dict[str, Any]) -> None:
    at = "cluster.component_placement"
    data = overridden(tree_of(FILE), f"~{at}.rollout", *(argument.format(at) for argument in arguments))
    assert data["cluster"]["component_placement"] == placement


def test_a_joined_key_shared_by_both_overrides_each() -> None:
    tree = tree_of("cluster: {component_placement: {actor: {placement: 1}, env: {node_group: a, placement: 2}}}\n")
    data = overridden(tree, 'cluster.component_placement."actor,env".placement=3')
    placement = data["cluster"]["component_placement"]
    assert placement == {"actor": {"placement": 3}, "env": {"node_group": "a", "placement": 3}}


def test_a_part_that_is_set_later_shadows_no_joined_key() -> None:
    at = "cluster.component_placement"
    _, findings = applied(tree_of(FILE), f"{at}.actor,env=4-7", f"{at}.actor=1")
    assert not list(findings)


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_wrong_part_of_a_joined_key_is_underlined(quote: str) -> None:
    _, (finding,) = applied(tree_of(FILE), f"~cluster.component_placement.{quote}actor,agent{quote}")
    assert (finding.code, finding.span.text) == ("override-path", "agent")


def test_places_are_in_the_arguments() -> None:
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
        ("a..b=1", "override-syntax", ".", "missing"),
        (".a=1", "override-syntax", ".", "missing"),
        ("[0].a=1", "override-syntax", "[", "starts with a name"),
        ("a.[0]=1", "override-syntax", ".", "before the index"),
        ("a[x]=1", "override-syntax", "[x]", "not the index"),
        ("a[-1]=1", "override-syntax", "[-1]", "not the index"),
        ("a[99999999999]=1", "override-syntax", "[99999999999]", "not the index"),
        ("a. b=1", "override-syntax", " ", "white space"),
        ('a."b=1', "override-syntax", '"b=1', "never closed"),
        ("", "override-syntax", "", "missing"),
        ("=3", "override-syntax", "=", "missing"),
        ("a b=3", "override-syntax", " ", "not valid here"),
        ("a[0=3", "override-syntax", "[0=3", "never closed"),
        ("~cluster.num_nodes=3", "override-syntax", "=3", "deletes"),
        ("a=1\nb=2", "override-syntax", "\N{REPLACEMENT CHARACTER}", "line end"),
        ("a=\x1b[31m", "override-syntax", "\N{REPLACEMENT CHARACTER}", "control character"),
        ("a=\udcff", "override-syntax", "\N{REPLACEMENT CHARACTER}", "not UTF-8"),
        ("+a=1", "override-plus", "+", "`+`"),
        ("++a.b=1", "override-plus", "++", "write `a.b=1`: keys missing from the file can be set like any other"),
        ("a={b:1,c:2}", "override-value", "b:1", "one word"),
        ("a=[{b:1}]", "override-value", "b:1", "write a space after the colon: `b: 1`"),
        ("a=run #5", "override-value", "#5", "dropped as a comment"),
        ("a=#5", "override-value", "#5", "dropped as a comment; quote the value"),
        ("a={b: #c", "yaml-syntax", "{", "never closed"),
        ("a=b: [1] # c", "override-value", "# c", "dropped as a comment"),
        ("a=&b c", "override-value", "&b", "has a meaning in YAML"),
        ("a=|", "override-value", "|", "has a meaning in YAML"),
        ("extends=other.yaml", "override-path", "extends", "extends"),
        ("cluster.num_nodes.x=1", "override-path", "x", "single value"),
        ("cluster.node_groups.label=1", "override-path", "label", "is a list"),
        ("cluster.node_groups.0.label=1", "override-path", "0", "its items are `cluster.node_groups[0]`, ..."),
        ("cluster.node_groups[2].label=1", "override-path", "[2]", "`[0]` to `[1]`"),
        ("cluster.num_nodes[0]=1", "override-path", "[0]", "is not a list"),
        ("cluster.component_placement[0]=1", "override-path", "[0]", "is not a list"),
        ("nothing[0]=1", "override-path", "[0]", "is not set"),
        ("~cluster.num_node", "override-path", "num_node", "to delete; did you mean `num_nodes`?"),
        ("~x.y.z", "override-path", "x", "no `x` to delete"),
        ("~cluster.component_placement.agent", "override-path", "agent", "to delete"),
        (".".join("a" * 60) + "=1", "override-path", ".".join("a" * 10), "at most 50"),
    ],
)
def test_what_is_refused(argument: str, code: str, underlined: str, words: str) -> None:
    problem = refused(tree_of(FILE), argument)
    assert (problem.code, problem.span.text) == (code, underlined)
    assert words in f"{problem.message}; {problem.help}"


def test_a_key_of_a_reference_is_not_overridden_behind_its_back() -> None:
    problem = refused(tree_of("a: ${b}\nb: {x: 1}\n"), "a.x=2")
    assert problem.code == "override-path"
    assert "`${b}`" in problem.message


def test_bad_yaml_is_reported_and_other_arguments_apply() -> None:
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
def test_an_override_without_effect_is_a_warning(arguments: list[str], shadowed: list[str]) -> None:
    diagnostics = Diagnostics()
    parse_overrides(arguments, diagnostics)
    assert [d.span.text for d in diagnostics if d.code == "override-shadowed"] == shadowed
    assert diagnostics.ok


@given(st.lists(_KEYS, min_size=1, max_size=5), st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False)))
def test_what_is_set_is_found(keys: list[str], value: Any) -> None:
    path = ("new section", *keys)
    tree, changed = applied(tree_of(FILE), f"{format_path(path)}={inline(value)}")
    assert not list(changed)
    node = find(tree, path)
    assert node is not None
    assert to_data(node) == value


@given(st.lists(st.one_of(st.text(), st.text(alphabet="~+cluster.num_nodes[0]=\"'{}:, \n\t"))))
def test_no_argument_whatever_raises(arguments: list[str]) -> None:
    source, overrides = parse_overrides(arguments, diagnostics := Diagnostics())
    apply_overrides(tree_of(FILE), overrides, diagnostics)
    assert source is None or len(source.text.split("\n")) == len(arguments)
    assert all(0 <= d.span.start <= d.span.end <= len(d.span.source.text) for d in diagnostics)


@given(st.text(alphabet="abcnum_des.=[]{}\"'${}:-,&*!|>%@`#\t ~", max_size=30))
def test_no_value_whatever_raises(value: str) -> None:
    for argument in (f"a={value}", f"cluster.component_placement={{{value}}}", f"cluster.node_groups{value}=1"):
        _, diagnostics = applied(tree_of(FILE), argument)
        assert all(0 <= d.span.start <= d.span.end <= len(d.span.source.text) for d in diagnostics)


class Optim(BaseModel):
    lr: float = 1e-4
    betas: tuple[float, ...] = (0.9, 0.99)


class Group(BaseModel):
    label: str
    ranks: str = "all"


class Job(BaseModel, arbitrary_types_allowed=True):
    name: str = Field(default="job", alias="title")
    optim: Optim = Optim()
    groups: tuple[Group, ...] = ()
    by_name: dict[str, Group] = {}
    hf_token: str = "default-token"
    nothing: None = None
    ports: range = range(20, 30)


def listed(tree: MappingNode, model: BaseModel | None = None) -> list[tuple[str, str, str]]:
    return [(format_path(origin.path), origin.text, origin.where) for origin in origins(tree, model)]


def test_files_overrides_and_references() -> None:
    composed, _ = composing("a: {x: 2.50, y: []}\nb: ${a.x}\nc:\nd: [p, q]\n", "a.z=[1, 2]", "e={}")
    assert listed(composed.tree) == [
        ("a.x", "2.50", "job.yaml:1:8"),
        ("a.y", "[]", "job.yaml:1:17"),
        ("a.z[0]", "1", "override a.z=[1, 2]"),
        ("a.z[1]", "2", "override a.z=[1, 2]"),
        ("b", "2.50", "job.yaml:2:4"),
        ("c", "null", "job.yaml:3:1"),
        ("d[0]", "p", "job.yaml:4:5"),
        ("d[1]", "q", "job.yaml:4:8"),
        ("e", "{}", "override e={}"),
    ]


def test_defaults_follow_what_is_written() -> None:
    composed, _ = composing("title: t\noptim: {lr: 1}\ngroups: [{label: a}]\nby_name: {g: {label: b}}\n")
    model = Job.model_validate(to_data(composed.tree))
    result = listed(composed.tree, model)
    defaults = [(path, text) for path, text, where in result if where == "default"]
    assert defaults == [
        ("optim.betas[0]", "0.9"),
        ("optim.betas[1]", "0.99"),
        ("groups[0].ranks", "all"),
        ("by_name.g.ranks", "all"),
        ("hf_token", f'"{MASK}"'),
        ("nothing", "null"),
        ("ports", "20-29"),
    ]
    assert len(result) == len(defaults) + 4


def test_secrets_are_not_told() -> None:
    composed, _ = composing("a: ${env:HF_TOKEN}\n", "b.api_key=hunter2", HF_TOKEN="hf_x")
    assert listed(mask(composed.tree, composed.secret)) == [
        ("a", f'"{MASK}"', "job.yaml:1:4"),
        ("b.api_key", f'"{MASK}"', "override b.api_key=*******"),
    ]


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.text(alphabet="yYnNoOfF0123456789.-+:eE_~ #${}[]'\"\\,&*!|>%@`\n\t", max_size=12),
    st.text(alphabet="a: #-", max_size=6),
    st.sampled_from(
        ["null", "true", "0-3", "0-1:0-3", "1:2", "010", "0o7", "1e3", ".5", "<<", "=", "---", "...", "- a"]
    ),
)
_NAMES = st.text(max_size=20)
_DATA = st.dictionaries(
    _NAMES,
    st.recursive(
        _SCALARS,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_NAMES, inner, max_size=3)),
        max_leaves=10,
    ),
    min_size=1,
    max_size=4,
).filter(lambda data: "extends" not in data)


def loaded(text: str) -> MappingNode:
    composed, diagnostics = composing(text)
    assert not list(diagnostics)
    return composed.tree


def tree_from(data: Any) -> Any:
    span = Span(SourceText("data", ""), 0, 0)
    if isinstance(data, dict):
        return MappingNode(span, tuple(Entry(ScalarNode(span, key, key), tree_from(data[key])) for key in data))
    if isinstance(data, list):
        return SequenceNode(span, tuple(map(tree_from, data)))
    return ScalarNode(span, data if isinstance(data, str) else inline(data), data)


@given(_DATA)
def test_data_loads_back(data: Any) -> None:
    tree = loaded(resolved_text(tree_from(data)))
    assert to_data(tree) == data
    assert repr(to_data(tree)) == repr(data)
    assert resolved_text(loaded(resolved_text(tree))) == resolved_text(tree)


@given(st.one_of(st.text(), st.text(alphabet="a: #-", max_size=6), st.text(alphabet="1:_.-eE0bx", max_size=6)))
def test_text_stays_text_for_readers_of_old_yaml_too(text: str) -> None:
    old = YAML(typ="safe", pure=True)
    old.version = (1, 1)
    data = old.load(f"a: {inline(text)}")["a"]
    assert data == text.replace("${", "$${")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-05, "1e-05"),
        (float("inf"), ".inf"),
        ("a800", "a800"),
        ("/opt/venv/bin/python3", "/opt/venv/bin/python3"),
        ("0-1:0-199,2-3:200-399", "0-1:0-199,2-3:200-399"),
        ("two words", "two words"),
        ("4090", '"4090"'),
        ("true", '"true"'),
        ("yes", '"yes"'),
        ("1:30", '"1:30"'),
        ("2024-01-01", '"2024-01-01"'),
        ("", '""'),
        ("a: b", '"a: b"'),
        ("a #b", '"a #b"'),
        ("${x}", '"$${x}"'),
        ("line\nline", '"line\\nline"'),
        ("机器人", '"机器人"'),
    ],
)
def test_single_values(value: Any, text: str) -> None:
    assert inline(value) == text


def test_layout() -> None:
    data = {"a": {"b": [1, {"c": "x", "d": []}, [2, 3]], "e": {}}, "f": None}
    assert resolved_text(tree_from(data)) == (
        "a:\n  b:\n    - 1\n    - c: x\n      d: []\n    - - 2\n      - 3\n  e: {}\nf: null\n"
    )


def test_numbers_keep_their_text() -> None:
    text = "a: 2.50\nb: 0x1F\nc: 1_000\nd: 010\ne: True\nf: 1e3\n"
    assert resolved_text(tree_of(text)) == text.replace("1_000", '"1_000"')
