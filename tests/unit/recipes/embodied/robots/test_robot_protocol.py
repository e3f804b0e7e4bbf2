"""Lines and messages: what is said arrives, and what is no message is refused whatever it is."""

from __future__ import annotations

import contextlib
import json
import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.robots import wire_protocol
from recipes.embodied.robots.wire_protocol import MAX_LINE, ProtocolError, decode, encode, request_of

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(string.printable, max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=10), values, max_size=4))
def test_what_is_said_arrives(message: dict[str, object]) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_refused(line: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(line), dict)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b"7\n",
        b'{"op": NaN}\n',
        b'{"op": Infinity}\n',
        b"[" * 4000 + b"\n",
        b'{"a":' * 700 + b"\n",
        b'"\xff\xfe"\n',
        b"GET / HTTP/1.1\r\n",
        b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.\n",
        b'{"a": "' + b"x" * MAX_LINE + b'"}\n',
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line)


def test_what_cannot_be_said_is_refused() -> None:
    for message in ({"a": math.nan}, {"a": object()}, {"a": "x" * MAX_LINE}):
        with pytest.raises(ProtocolError):
            encode(message)


@pytest.mark.parametrize(
    "message", [{}, {"op": 7}, {"op": "a", "id": -1}, {"op": "a", "id": 1.5}, {"op": "a", "id": True}]
)
def test_what_is_no_request_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        request_of(message)


JOINTS = [0.0] * 7


@pytest.mark.parametrize(
    ("read", "name", "good", "bad"),
    [
        (
            lambda fields: wire_protocol.parse_joints(fields, "deltas"),
            "deltas",
            [JOINTS, [1, 2, 3, 4, 5, 6, 7]],
            [None, "1234567", [0.0] * 6, [0.0] * 8, [True] * 7, [*JOINTS[1:], "1"], [*JOINTS[1:], 10**400], {}],
        ),
        (wire_protocol.parse_heartbeat, "heartbeat", [0.1, 2, 60.0], [None, 0, 61, "2", True, -1]),
        (wire_protocol.parse_holder, "holder", ["me", "x" * 120], [None, "", "x" * 121, "a\nb", 7, "\x1b[2J"]),
        (wire_protocol.parse_grip, "close_gripper", [None, True, False], [0, 1, "yes"]),
    ],
)
def test_fields_hold_what_they_may(read, name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        text = read(json.loads(json.dumps({name: value})))
        assert list(text) == value if isinstance(value, list) else text == value
    for value in bad:
        with pytest.raises(ProtocolError, match=name):
            read({name: value})
