"""JSON that others wrote."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.foreign.strict_json import MAX_DEPTH, BadJsonError, load_json, load_json_object

pytestmark = pytest.mark.security

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_VALUES)
def test_what_json_holds_comes_back(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
        assert load_json(text) == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("\n[1,\n 2}", "is not JSON: Expecting ',' delimiter at line 3, column 3"),
        ("", "is not JSON"),
        ("NaN", "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ("[1e999]", "holds a number that is too large: 1e999"),
        ("[-1" + "0" * 400 + "]", "holds a number that is too large: -1000000000000000000"),
        ("9" * 5000, "holds an integer of too many digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "names the key 'c' twice"),
        (r'["\ud800"]', "holds half of a character"),
        (r'{"\uDc00": 1}', "holds half of a character"),
        ('["\ud800"]', "holds half of a character"),
        ("[" * 200_000, "is nested more than 100 levels deep"),
        ('{"a":' * 200_000, "is nested more than 100 levels deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "is nested more than 100 levels deep"),
        (b'"\xff"', "is not UTF-8 text: byte 1"),
        ('"\x01"', "is not JSON"),
    ],
)
def test_text_that_is_refused(text: str | bytes, fault: str) -> None:
    with pytest.raises(BadJsonError, match=fault.replace("(", r"\(").replace("[", r"\[")) as caught:
        load_json(text)
    str(caught.value).encode()


def test_depth_that_is_allowed() -> None:
    assert load_json("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH)
    assert load_json("[" + ", ".join(["[]"] * 1000) + "]") == [[]] * 1000


def test_character_of_two_halves() -> None:
    assert load_json(r'"\ud83d\ude00"') == "😀"
    assert load_json(rb'"a \\ud800 b"') == r"a \ud800 b"


def test_byte_order_mark() -> None:
    assert load_json(b"\xef\xbb\xbf[1]") == load_json("\ufeff[1]") == [1]


def test_numbers_that_are_not_finite_where_they_are_taken() -> None:
    assert load_json("[Infinity, 1.5]", non_finite=True) == [math.inf, 1.5]


def test_object() -> None:
    assert load_json_object('{"a": 1}') == {"a": 1}
    with pytest.raises(BadJsonError, match="is not a JSON object"):
        load_json_object("[1]")
