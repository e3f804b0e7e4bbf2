"""References between keys, and how files are laid over one another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.composing.references import (
    Reference,
    escape_references,
    has_references,
    split_references,
)
from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.reading import split_components
from rlinf_core.config.tree import (
    Entry,
    MappingNode,
    Node,
    NotationError,
    ScalarNode,
    SequenceNode,
    SourceText,
    Span,
    find,
    key_span,
    merge,
    to_data,
)
from tests.unit.config.texts import composing, tree_of


def resolved(text: str, **environ: str) -> Any:
    composed, result = composing(text, **environ)
    assert not list(result)
    assert not composed.unresolved
    return to_data(composed.tree)


@given(st.text(alphabet="$ {}a:-.env", max_size=40))
def test_an_escaped_text_is_itself(text: str) -> None:
    assert "".join(str(piece) for piece in split_references(escape_references(text))) == text


@given(st.text(alphabet="$ {}a:-.env[0]\"'\\", max_size=40))
def test_any_text_is_split_or_refused_inside_of_it(text: str) -> None:
    try:
        pieces = split_references(text)
    except NotationError as error:
        refusal = error
    else:
        references = [piece for piece in pieces if isinstance(piece, Reference)]
        assert all(
            text[reference.start : reference.start + 2] == "${" and text[reference.end - 1] == "}"
            for reference in references
        )
        return
    assert has_references(text[refusal.start : refusal.end])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("n: 4\na: ${n}\n", 4),
        ("n: 2.50\na: ${n}\n", 2.5),
        ("n: [1, {x: 2}]\na: ${n}\n", [1, {"x": 2}]),
        ("n: [1, {x: 2}]\na: ${n[1].x}\n", 2),
        ("n: {'b.c': 7}\na: ${n.\"b.c\"}\n", 7),
        ("n: 4\na: 0-${n}\n", "0-4"),
        ("n: 2.50\na: v${n}${n}\n", "v2.502.50"),
        ("n:\na: x${n}y\n", "xy"),
        ("n: 'null'\na: ${n}\n", "null"),
        ("n: {x: 1}\nm: ${n}\na: ${m.x}\n", 1),
        ("a: ${b}\nb: ${c}\nc: 5\n", 5),
        ("a: $${b}\n", "${b}"),
        ("n: 1\na: $${n}-${n}-$n-$\n", "${n}-1-$n-$"),
        ("n: $${x}\na: ${n}\n", "${x}"),
        ("n: {y: '$${x}'}\na: ${n.y}!\n", "${x}!"),
        ("a: ${env:N}\n", 4),
        ("a: '${env:N}'\n", 4),
        ("a: ${env:N}-${env:EMPTY:-7}\n", "4-7"),
        ("a: ${env:NONE:-1e-4}\n", 1e-4),
        ("a: ${env:NONE:-a b}\n", "a b"),
        ("a: ${env:NONE:-}\n", None),
        ("a: ${env:EMPTY}\n", None),
        ("a: ${env:TEXT}\n", "x: 1"),
        ("a: ${oc.env:N}\n", 4),
        ("a: ${oc.env:N,7}\n", 4),
        ("a: ${oc.env:NONE,7}\n", 7),
        ("a: ${oc.env:NONE, /data/a b }/x\n", "/data/a b/x"),
        ("a: ${oc.env:NONE,'7 8'}\n", "7 8"),
        ("a: ${oc.env:NONE,null}\n", None),
        ("cluster: {component_placement: {'actor,env': 0-3}}\na: ${cluster.component_placement.env}\n", "0-3"),
        ("n: 1\na: |\n  text ${n}\n", "text 1\n"),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert resolved(text, N="4", EMPTY="", TEXT="x: 1")["a"] == value


def test_numbers_keep_their_text() -> None:
    data = resolved("n: 2.50\n${n}: x\na: ${n}\nb: ${env:V}\n", V="1.0")
    assert (data["a"].raw, data["b"].raw, data["${n}"]) == ("2.50", "1.0", "x")


def test_references_see_overrides_and_overrides_refer() -> None:
    composed, result = composing("n: 1\na: ${n}\n", "n=2", "b=${a}${n}")
    assert result.ok
    assert to_data(composed.tree) == {"n": 2, "a": 2, "b": "22"}


def test_the_value_stands_where_it_is_used() -> None:
    composed, _ = composing("n: {x: 1}\na: ${n}\nb: ${n.x}\n")
    places = [find(composed.tree, path) for path in (("a",), ("a", "x"), ("b",))]
    assert [str(node.span) for node in places if node] == ["job.yaml:2:4", "job.yaml:1:8", "job.yaml:3:4"]


@pytest.mark.parametrize(
    ("text", "code", "line", "underlined", "words"),
    [
        ("abc: 1\na: ${abd}\n", "unknown-reference", 2, "${abd}", "did you mean `abc`?"),
        ('b: 1\na: "\\t${b} ${x} ${x}"\n', "unknown-reference", 2, "${x}", "sets no `x`"),
        ("recipe: x\na: ${gone}\n", "unknown-reference", 2, "${gone}", "sets no `gone`"),
        ("a: ${b}\n", "unknown-reference", 1, "${b}", "the file sets no `b`"),
        ("n: {x: 1}\na: 0-${n.y}\n", "unknown-reference", 2, "${n.y}", "`n` sets no `y`"),
        ("n: [1]\na: ${n[1]}\n", "unknown-reference", 2, "${n[1]}", "`n` has 1 item,"),
        ("n: [1]\na: ${n.x}\n", "unknown-reference", 2, "${n.x}", "`n` is a list"),
        ("n: {x: 1}\na: ${n[0]}\n", "unknown-reference", 2, "${n[0]}", "`n` is not a list"),
        ("n: 1\na: ${n.x}\n", "unknown-reference", 2, "${n.x}", "single value"),
        ("a: ${env:NONE}\n", "unknown-variable", 1, "${env:NONE}", "no variable `NONE`"),
        ("n: [1]\na: x ${n} y\n", "reference-in-text", 2, "${n}", "is a list"),
        ("n: {}\na: ' ${n}'\n", "reference-in-text", 2, "${n}", "is a mapping"),
        ("n: ~\na: x${n}\n", "reference-in-text", 2, "${n}", 'is null, which cannot be part of a text; write `""`'),
        ("a: x ${b\n", "reference-syntax", 1, "${b", "never closed"),
        ("a: ${env:N\n", "reference-syntax", 1, "${env:N", "never closed"),
        ("a: ${}\n", "reference-syntax", 1, "${}", "missing"),
        ("a: x ${b c} y\n", "reference-syntax", 1, "${b c}", "not valid here"),
        ("a: ${.b}\n", "reference-syntax", 1, "${.b}", "cannot start with `.`"),
        ("a: ${multiply:2,4}\n", "reference-syntax", 1, "${multiply:2,4}", "no resolver `multiply`"),
        ("a: x${env:BYTES}\n", "not-utf8", 1, "${env:BYTES}", "the variable `BYTES` is not UTF-8"),
        ("a: ${oc.env:NONE}\n", "unknown-variable", 1, "${oc.env:NONE}", "no variable `NONE`"),
        ("a: ${oc.env:1X}\n", "reference-syntax", 1, "${oc.env:1X}", "`1X` is not the name of a variable"),
        ("a: ${oc.env:X,${b}}\n", "reference-syntax", 1, "${oc.env:X,${b}", "cannot contain another"),
        ("a: ${env:1X}\n", "reference-syntax", 1, "${env:1X}", "not the name of a variable"),
        ("a: ${b.${c}}\n", "reference-syntax", 1, "${b.${c}", "not valid here"),
        ("a: ${env:X:-${b}}\n", "reference-syntax", 1, "${env:X:-${b}", "cannot contain another"),
        ("a: ${a}\n", "reference-cycle", 1, "${a}", "`a` -> `a`"),
        ("a: {x: '-${a}'}\n", "reference-cycle", 1, "${a}", "`a.x` -> `a.x`"),
        ("x: ${a}\na: ${b}\nb: 1${a}\n", "reference-cycle", 2, "${b}", "`a` -> `b` -> `a`"),
        ("a: ${a.b}\n", "reference-cycle", 1, "${a.b}", "`a` -> `a`"),
        ('a: "\\t${b}"\n', "unknown-reference", 1, "${b}", "sets no `b`"),
        ("n: 1\na: >\n  folded\n  ${n} ${b}\n", "unknown-reference", 4, "${b}", "sets no `b`"),
    ],
)
def test_mistakes(text: str, code: str, line: int, underlined: str, words: str) -> None:
    composed, result = composing(text, BYTES="\udcff")
    (problem,) = result
    assert (problem.code, problem.span.begin.line, problem.span.text) == (code, line, underlined)
    assert words in f"{problem.message}; {problem.help}"
    assert problem.path in composed.unresolved


def test_only_the_section_read_must_resolve_without_a_recipe() -> None:
    text = "a: ${gone}\nb: {x: '${mul:2,3}', y: 1}\ncluster: {n: '${c}', m: '${b.y}'}\nc: ${env:NONE}\n"
    composed, diagnostics = composing(text, without_recipe="cluster")
    assert [(diagnostic.severity, diagnostic.code, diagnostic.path) for diagnostic in diagnostics] == [
        (Severity.NOTE, "reference-not-checked", ("a",)),
        (Severity.ERROR, "unknown-variable", ("c",)),
    ]
    assert "`${gone}`, `${mul:2,3}`" in next(iter(diagnostics)).message
    assert to_data(composed.tree)["cluster"]["m"] == 1  # type: ignore[index, call-overload]


def test_dependents_of_a_mistake_are_unresolved_without_findings() -> None:
    composed, result = composing("a: ${b}\nb: ${gone}\nc: ${d}\nd: {x: '${b}', y: 1}\n")
    assert [problem.path for problem in result] == [("b",)]
    assert composed.unresolved == {("a",), ("b",), ("c", "x"), ("d", "x")}
    assert to_data(composed.tree)["c"]["y"] == 1  # type: ignore[index, call-overload]


TEXTS_OF_TEXTS = "".join(f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}\n" for n in range(1, 40))
LISTS_OF_LISTS = "".join(f"a{n}: [{', '.join([repr(f'${{a{n - 1}}}')] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize("levels", [TEXTS_OF_TEXTS, LISTS_OF_LISTS], ids=["texts", "lists"])
def test_what_multiplies_does_not_explode(levels: str) -> None:
    _, diagnostics = composing("a0: ha\n" + levels)
    assert [problem.code for problem in diagnostics] == ["reference-too-large"]


@pytest.mark.parametrize("forward", [True, False])
def test_a_chain_without_end_is_refused(forward: bool) -> None:
    lines = [f"a{n}: {{x: '${{a{n + 1}}}'}}\n" for n in range(2000)]
    if not forward:
        lines.reverse()
    _, diagnostics = composing("".join(lines) + "a2000: 1\n")
    assert [problem.code for problem in diagnostics] == ["reference-too-large"]


def test_deep_files_with_long_chains_do_not_overflow() -> None:
    deep = "[" * 90 + "'${a119}'" + "]" * 90
    chain = "".join(f"a{n}: ${{a{n - 1}}}\n" for n in range(119, 0, -1))
    _, diagnostics = composing(f"z: {deep}\n{chain}a0: {'{x: ' * 90}1{'}' * 90}\n")
    assert {problem.code for problem in diagnostics} <= {"reference-too-large"}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("a: ${env:HF_TOKEN}\n", {("a",)}),
        ("a: x${env:HF_TOKEN}\nb: ${a}\nc: [1, '${b}']\n", {("a",), ("b",), ("c", 1)}),
        ("api_key: k\na: ${api_key}\n", {("a",)}),
        ("s: {password: {x: 1, y: 2}}\na: ${s.password}\n", {("a", "x"), ("a", "y")}),
        ("a: ${env:PLAIN}\n", set()),
    ],
)
def test_what_came_from_a_secret_is_one(text: str, secret: set[Any]) -> None:
    composed, result = composing(text, HF_TOKEN="hf_x", PLAIN="p")
    assert not list(result)
    assert secret <= composed.secret
    assert ("c", 0) not in composed.secret
    assert bool(composed.secret) == bool(secret)


@given(st.dictionaries(st.sampled_from("abcde"), st.text(alphabet="$ {}abcde.env:-[0]x", max_size=20), max_size=5))
def test_no_references_whatever_raise(values: dict[str, str]) -> None:
    text = "x: 1\n" + "".join(f"{key}: '{value}'\n" for key, value in values.items())
    composed, result = composing(text)
    assert bool(composed.unresolved) == (not result.ok)


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


def both(base: str, upper: str) -> dict[str, Any]:
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
def test_joined_components(base: str, upper: str, result: dict[str, Any]) -> None:
    assert both(base, upper) == result


@pytest.mark.parametrize("keys", ["actor: 1\n    actor,env: 2", "env,actor: 1\n    '  actor': 2"])
def test_a_component_that_is_placed_twice_keeps_its_first_place(keys: str) -> None:
    findings = Diagnostics()
    data: Any = to_data(split_components(tree_of(f"cluster:\n  component_placement:\n    {keys}"), (), findings))
    assert data["cluster"]["component_placement"]["actor"] == 1
    (finding,) = findings
    ((first, _),) = finding.related
    assert (finding.code, finding.span.text.strip("' "), first.text) == ("component-twice", "actor", "actor")
    assert (finding.span.begin.line, first.begin.line) == (4, 3)


def test_a_split_key_points_at_its_piece() -> None:
    base = tree_of("cluster:\n  component_placement:\n    actor, env: 0-3")
    upper = tree_of("cluster:\n  component_placement:\n    actor: 4-7", name="over.yaml")
    tree = over(base, upper)
    env = key_span(tree, ("cluster", "component_placement", "env"))
    actor = key_span(tree, ("cluster", "component_placement", "actor"))
    assert env is not None
    assert (env.text, str(env)) == ("env", "job.yaml:3:12")
    assert actor is not None
    assert str(actor) == "over.yaml:3:5"


def test_keys_and_values_point_at_who_wrote_them_last() -> None:
    tree = merge(tree_of("a:\n  x: 1\n  y: 2\n"), tree_of("a:\n  y: 3\n", name="over.yaml"))
    assert isinstance(tree, MappingNode)
    assert [str(key_span(tree, path)) for path in (("a",), ("a", "x"), ("a", "y"))] == [
        "over.yaml:1:1",
        "job.yaml:2:3",
        "over.yaml:2:3",
    ]
