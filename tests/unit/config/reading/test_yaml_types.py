"""YAML 1.2 core schema, and nothing of YAML 1.1."""

from __future__ import annotations

import ast
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.tree import resolve_plain

# A scalar as it is written, and what it means in Python.
VALUES = """
    ~ None, null None, Null None, NULL None, true True, True True, FALSE False,
    0 0, -7 -7, +7 7, 010 10, 0644 644, 0o10 8, 0x1F 31, 0xff 255,
    1.5 1.5, 2.50 2.5, 1. 1.0, .5 0.5, -.5 -0.5, 5e5 5e5, 1e3 1000.0, 1E-3 0.001
"""
# Booleans, binary and sexagesimal numbers, underscores and dates of YAML 1.1, and near misses of 1.2.
TEXTS = """
    on off yes no y n nULL tRUE 0b11 1_000 1:20 1:2 0-7 2024-01-01 0o8 0xg -0x1 -0o7 + - . .. 1e e5 .e5 1.2.3
    10.10.10.1 0-1:0-199 nan inf .infinity +.nan 12a ١٢ ²
"""


@pytest.mark.parametrize("row", VALUES.replace("\n", " ").split(","))
def test_core_schema(row: str) -> None:
    raw, expected = row.split()
    assert repr(resolve_plain(raw)) == repr(ast.literal_eval(expected))


def test_an_empty_scalar_infinities_and_no_number() -> None:
    assert resolve_plain("") is None
    assert [resolve_plain(raw) for raw in (".inf", "+.Inf", "-.INF")] == [math.inf, math.inf, -math.inf]
    for raw in (".nan", ".NaN", ".NAN"):
        value = resolve_plain(raw)
        assert isinstance(value, float)
        assert math.isnan(value)


@pytest.mark.parametrize("raw", TEXTS.split())
def test_everything_else_is_text(raw: str) -> None:
    assert resolve_plain(raw) == raw


def test_a_huge_number_does_not_raise() -> None:
    digits = "9" * 5000
    assert resolve_plain(digits) == digits
    assert resolve_plain("0x" + "f" * 5000) == "0x" + "f" * 5000
    assert resolve_plain("9" * 1000) == 10**1000 - 1
    assert resolve_plain("1e999") == math.inf


@given(st.integers())
def test_integers_round_trip(number: int) -> None:
    assert resolve_plain(str(number)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(number: float) -> None:
    assert resolve_plain(repr(number)) == number


@given(st.text())
def test_any_text_has_a_value(raw: str) -> None:
    value = resolve_plain(raw)
    assert value is None or isinstance(value, bool | int | float) or value == raw
