"""Where values come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from ruamel.yaml import YAML

from rlinf_core.config.composing.compose import compose
from rlinf_core.config.composing.origins import inline, origins, resolved_text
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import decode
from rlinf_core.config.secrets import MASK, mask
from rlinf_core.config.source import SourceText, Span
from rlinf_core.config.tree import Composed, Entry, MappingNode, ScalarNode, SequenceNode, format_path, to_data

Compose = Callable[..., "tuple[Composed, Diagnostics]"]


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


def test_files_overrides_and_references(composing: Compose) -> None:
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


def test_defaults_follow_what_is_written(composing: Compose) -> None:
    composed, _ = composing("title: t\noptim: {lr: 1}\ngroups: [{label: a}]\nby_name: {g: {label: b}}\n")
    model = Job.model_validate(to_data(composed.tree))
    result = listed(composed.tree, model)
    defaults = [(path, text) for path, text, where in result if where == "default"]
    assert defaults == [
        ("optim.betas[0]", "0.9"),
        ("optim.betas[1]", "0.99"),
        ("groups[0].ranks", "all"),
        ("by_name.g.ranks", "all"),
        ("hf_token", MASK),
        ("nothing", "null"),
        ("ports", "20-29"),
    ]
    assert len(result) == len(defaults) + 4


def test_an_empty_value_that_only_the_model_has(composing: Compose) -> None:
    composed, _ = composing("title: t\n")
    result = listed(composed.tree, Job.model_validate(to_data(composed.tree)))
    assert ("optim.lr", "0.0001", "default") in result
    assert ("groups", "[]", "default") in result


def test_secrets_are_not_told(composing: Compose) -> None:
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
_KEYS = st.text(max_size=20)
_DATA = st.dictionaries(
    _KEYS,
    st.recursive(
        _SCALARS,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
        max_leaves=10,
    ),
    min_size=1,
    max_size=4,
).filter(lambda data: "extends" not in data)


def loaded(text: str) -> MappingNode:
    diagnostics = Diagnostics()
    source = decode("dump.yaml", text.encode(), diagnostics)
    assert source is not None, list(diagnostics)
    composed = compose(source, (), diagnostics, environ={})
    assert composed is not None, (text, list(diagnostics))
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
    again = to_data(loaded(resolved_text(tree_from(data))))
    assert again == data
    assert repr(again) == repr(data)


@given(_DATA)
def test_a_tree_loads_back_with_its_raw_texts(data: Any) -> None:
    tree = loaded(resolved_text(tree_from(data)))
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


def test_numbers_keep_their_text(tree_of: Callable[..., MappingNode]) -> None:
    text = "a: 2.50\nb: 0x1F\nc: 1_000\nd: 010\ne: True\nf: 1e3\n"
    assert resolved_text(tree_of(text)) == text.replace("1_000", '"1_000"')
