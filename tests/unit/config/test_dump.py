"""Writing YAML that loads back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from rlinf_core.config.compose import compose
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.dump import inline, to_yaml
from rlinf_core.config.reader import decode
from rlinf_core.config.tree import MappingNode, to_data

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
    found = Diagnostics()
    source = decode("dump.yaml", text.encode(), found)
    assert source is not None, list(found)
    composed = compose(source, (), found, environ={})
    assert composed is not None, (text, list(found))
    assert not list(found)
    return composed.tree


@given(_DATA)
def test_data_loads_back(data: Any) -> None:
    again = to_data(loaded(to_yaml(data)))
    assert again == data
    assert repr(again) == repr(data)


@given(_DATA)
def test_a_tree_loads_back_with_its_raw_texts(data: Any) -> None:
    tree = loaded(to_yaml(data))
    assert to_yaml(loaded(to_yaml(tree))) == to_yaml(tree)


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
    assert to_yaml(data) == ("a:\n  b:\n    - 1\n    - c: x\n      d: []\n    - - 2\n      - 3\n  e: {}\nf: null\n")


def test_numbers_keep_their_text(tree_of: Callable[..., MappingNode]) -> None:
    text = "a: 2.50\nb: 0x1F\nc: 1_000\nd: 010\ne: True\nf: 1e3\n"
    assert to_yaml(tree_of(text)) == text.replace("1_000", '"1_000"')
