"""Secret values that a process knows, masked in any text."""

from __future__ import annotations

import json
import logging
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.process.known_secrets import MASK, forget, hidden, hiding_formatter, known, remember

pytestmark = pytest.mark.security


@given(st.text(min_size=6, max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_value_is_found_in_every_form(value: str, before: str, after: str) -> None:
    forget()
    remember([value])
    value = value.strip()
    if value not in known():
        return
    for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")):
        assert MASK in hidden(f"{before}{form}{after}")
    assert hidden(f"x {value} y").startswith("x ")


@pytest.mark.parametrize(
    "value", ["", "short", "true", "False", "null", "123456", "1234567.25", "-12345678", "     x   "]
)
def test_values_that_stand_in_innocent_text_are_left(value: str) -> None:
    remember([value])
    assert known() == ()
    assert hidden("true 123456 short") == "true 123456 short"


def test_longest_value_wins() -> None:
    remember(["secret-value", "secret-value-and-more"])
    assert hidden("a secret-value-and-more b secret-value") == f"a {MASK} b {MASK}"


def test_lines_of_a_key_are_masked() -> None:
    remember(["-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----\n"])
    assert hidden("bad key: MIIEvQIBADANBgkq") == f"bad key: {MASK}"
    assert hidden("-----BEGIN PRIVATE KEY-----") == "-----BEGIN PRIVATE KEY-----"


def test_number_of_values_is_bounded() -> None:
    remember(f"value-{number:06}" for number in range(3000))
    assert len(known()) == 1000
    assert hidden("value-002999 value-000000") == f"{MASK} value-000000"


def test_log_lines_and_tracebacks_are_masked() -> None:
    remember(["secret-value"])
    try:
        raise ValueError("secret-value")
    except ValueError as error:
        record = logging.LogRecord("x", 20, "x", 1, "got %s", ("secret-value",), (type(error), error, None))
    line = hiding_formatter("%(message)s").format(record)
    assert "secret-value" not in line
    assert line.startswith(f"got {MASK}")
