"""Lines and messages: what is said arrives, and what is no message is refused whatever it is."""

from __future__ import annotations

import contextlib
import json
import math
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.robots.wire_protocol import (
    MAX_LINE,
    Acquiring,
    ArmState,
    Box,
    ControllerFacts,
    Moving,
    ProtocolError,
    Resetting,
    decode,
    encode,
    request_of,
)

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
ACQUIRE = {"holder": "me", "heartbeat": 2}
STATE = {"joints": JOINTS, "target": JOINTS}
LIMITS = {"low": JOINTS, "high": JOINTS, "velocity": JOINTS}
PING = {"controller": "rlinf-simulated", "version": "3.0", "period": 0.05, "limits": LIMITS}
NO_JOINTS = [None, "1234567", [0.0] * 6, [0.0] * 8, [True] * 7, [*JOINTS[1:], "1"], [*JOINTS[1:], 10**400], {}]


@pytest.mark.parametrize(
    ("kind", "others", "name", "good", "bad"),
    [
        (Moving, {}, "deltas", [JOINTS, [1, 2, 3, 4, 5, 6, 7]], [*NO_JOINTS, [*JOINTS[1:], math.nan]]),
        (Resetting, {}, "joints", [JOINTS], NO_JOINTS),
        (Moving, {"deltas": JOINTS}, "close_gripper", [None, True, False], [0, 1, "yes"]),
        (Moving, {"deltas": JOINTS}, "after", [None, 1, 2.5], ["1", True, [], math.inf]),
        (Acquiring, ACQUIRE, "heartbeat", [0.1, 2, 60.0], [None, 0, 61, "2", True, -1, math.nan]),
        (Acquiring, ACQUIRE, "holder", ["me", "x" * 120], [None, "", "x" * 121, "a\nb", 7, "\x1b[2J"]),
        (Acquiring, ACQUIRE, "workspace", [None], [[], [[0, 0, 0]], [[0, 0, 0], [1, 1, 0]], [[0, 0], [1, 1]], "", 1]),
        (
            Acquiring,
            ACQUIRE,
            "gripper",
            [None],
            ["hand", {}, {"type": 7}, {"type": "a\nb"}, {"type": "a", "connection": 1}],
        ),
        (ArmState, STATE, "joints", [JOINTS], NO_JOINTS),
        (ArmState, STATE, "cameras", [{}, {"c1": 0.5}], [[], {"c1": "new"}]),
        (ArmState, STATE, "success_rate", [0.5], ["all", None]),
        (ArmState, STATE, "tick", [3], ["3", 0.5]),
        (ControllerFacts, PING, "period", [0.05, 1], [None, "1", math.inf]),
        (ControllerFacts, PING, "limits", [], [None, [], {}, {**LIMITS, "low": [0.0]}]),
    ],
)
def test_fields_hold_what_they_may(
    kind: Any, others: dict[str, object], name: str, good: list[object], bad: list[object]
) -> None:
    for value in good:
        read = getattr(kind.of(json.loads(json.dumps({**others, name: value}))), name)
        assert read.tolist() == value if isinstance(read, np.ndarray) else read == value
    for value in bad:
        with pytest.raises(ProtocolError, match=name):
            kind.of({**others, name: value})


def test_a_gripper_and_a_workspace_are_read() -> None:
    hand = {"type": "robotiq", "connection": "/dev/ttyUSB0"}
    asked = Acquiring.of({**ACQUIRE, "gripper": hand, "workspace": [[0, 0, 0], [1, 2, 3]]})
    assert asked.gripper is not None
    assert asked.gripper.model_dump() == hand
    assert asked.workspace == Box((0, 0, 0), (1, 2, 3))
