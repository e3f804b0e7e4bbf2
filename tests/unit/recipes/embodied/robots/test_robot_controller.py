"""What a controller decides, moment by moment, and the messages that it is asked by."""

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

from recipes.embodied.robots.controller.arm import RESET_SPEED, SimulatedArm
from recipes.embodied.robots.controller.controller import WATCHDOG_SECONDS, Controller, Motion
from recipes.embodied.robots.franka_arm import CONTROL_SECONDS, HOME, JOINT_MAX, JOINT_MIN, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.wire_protocol import (
    MAX_LINE,
    Acquiring,
    ArmState,
    Box,
    ControllerFacts,
    ControllerRequest,
    Message,
    Moving,
    ProtocolError,
    Resetting,
    decode,
    encode,
    request_of,
)
from tests.known import known

A, B = 1, 2  # connections
START = (HOME + 0.5).clip(JOINT_MIN, JOINT_MAX)
RESET_TAKES = float((np.abs(START - HOME) / (RESET_SPEED * VELOCITY_MAX)).max())


class Client:
    """A connection to a controller that is asked at given moments."""

    def __init__(self, controller: Controller, connection: int) -> None:
        self.controller, self.connection = controller, connection

    def ask(self, now: float, op: str, **fields: Any) -> Message | Motion | None:
        return self.controller.handle(self.connection, ControllerRequest(op, 5, fields), now)

    def reply(self, now: float, op: str, **fields: Any) -> Message:
        answer = self.ask(now, op, **fields)
        assert isinstance(answer, dict)
        assert answer["id"] == 5
        return answer

    def go(self, now: float, op: str, **fields: Any) -> Motion:
        answer = self.ask(now, op, **fields)
        assert isinstance(answer, Motion), answer
        return answer

    def live(self, begin: float, end: float) -> None:
        """Give signs of life from one moment to another."""
        for beat in np.linspace(begin, end, 2 + int((end - begin) / 0.05)):
            assert self.ask(float(beat), "beat") is None

    def acquire(self, now: float, heartbeat: float = 2.0) -> Message:
        return self.reply(now, "acquire", holder=f"client {self.connection}", heartbeat=heartbeat)


@pytest.fixture
def controller() -> Controller:
    return Controller(SimulatedArm())


@pytest.fixture
def a(controller: Controller) -> Client:
    return Client(controller, A)


@pytest.fixture
def b(controller: Controller) -> Client:
    return Client(controller, B)


def ready(client: Client, now: float = 0.0) -> float:
    """Hold the arm, at home; return a moment after that."""
    assert client.acquire(now)["ok"]
    motion = client.go(now, "reset", joints=HOME.tolist())
    client.live(now, motion.end)
    assert client.controller.finish(motion, motion.end)["ok"]
    return motion.end


def test_whoever_takes_it_says_what_its_gripper_is(a: Client) -> None:
    gripper = {"type": "robotiq", "connection": "/dev/ttyUSB0"}
    assert a.acquire(0.0)["gripper"] is None
    assert a.reply(0.1, "acquire", holder="a", heartbeat=2.0, gripper=gripper)["gripper"] == gripper
    assert a.reply(0.2, "state")["gripper"] == gripper


def test_one_holds_it_and_the_other_is_told_who(a: Client, b: Client) -> None:
    assert a.acquire(0.0)["holder"] == "client 1"
    refused = b.acquire(0.1)
    assert refused["ok"] is False
    assert refused["code"] == "busy"
    assert "client 1 holds the arm" in refused["message"]
    assert b.reply(0.1, "ping")["holder"] == "client 1"
    assert a.acquire(0.2)["ok"]  # again is fine
    assert a.reply(0.3, "release")["holder"] is None
    assert b.acquire(0.4)["holder"] == "client 2"


@pytest.mark.parametrize("op", ["reset", "move", "release"])
def test_only_the_holder_moves_it(a: Client, b: Client, op: str) -> None:
    fields = {"joints": HOME.tolist(), "deltas": [0.0] * 7}
    assert b.reply(0.0, op, **fields)["code"] == "no-lease"
    now = ready(a)
    refused = b.reply(now, op, **fields)
    assert refused["code"] == "no-lease"
    assert "client 1 holds it" in refused["message"]


def test_it_moves_only_after_a_reset(a: Client) -> None:
    a.acquire(0.0)
    refused = a.reply(0.0, "move", deltas=[0.01] * 7)
    assert refused["code"] == "stopped"
    assert "just been switched on" in refused["message"]
    now = ready(a)
    motion = a.go(now, "move", deltas=[0.01] * 7, close_gripper=True)
    assert motion.end == pytest.approx(now + CONTROL_SECONDS)
    done = a.controller.finish(motion, motion.end)
    np.testing.assert_allclose(done["joints"], HOME + 0.01)
    assert done["gripper_closed"] is True


def test_a_silent_holder_loses_it_and_the_arm_stops_on_its_way(a: Client, b: Client) -> None:
    now = ready(a)
    assert a.acquire(now, heartbeat=0.5)["ok"]
    motion = a.go(now, "reset", joints=START.tolist())
    assert motion.end == pytest.approx(now + RESET_TAKES)
    a.live(now, now + 0.4)
    assert b.acquire(now + 0.8)["code"] == "busy"
    got = b.acquire(now + 0.9)
    assert got["ok"]
    share = (0.4 + WATCHDOG_SECONDS) / RESET_TAKES
    np.testing.assert_allclose(got["joints"], HOME + share * (START - HOME))
    assert "client 1" in got["stopped"]
    assert "sent nothing for 0.1 s while the arm moved" in got["stopped"]
    assert b.reply(now + 2, "state")["joints"] == got["joints"]
    refused = a.controller.finish(motion, now + 1)
    assert refused["code"] == "silent"
    assert a.reply(now + 1, "move", deltas=[0.0] * 7)["code"] == "no-lease"


def test_a_lost_link_stops_it_at_once(a: Client, b: Client) -> None:
    now = ready(a)
    motion = a.go(now, "reset", joints=START.tolist())
    a.live(now, now + RESET_TAKES / 2)
    assert not a.controller.lost(B, "it is not the holder's", now + 0.1)
    assert not a.controller.interrupted(motion)
    assert a.controller.lost(A, "its connection was closed", now + RESET_TAKES / 2)
    assert a.controller.interrupted(motion)
    got = b.acquire(now + 10)
    np.testing.assert_allclose(got["joints"], (HOME + START) / 2)
    assert "its connection was closed" in got["stopped"]
    assert b.reply(now + 10, "move", deltas=[0.0] * 7)["code"] == "stopped"
    again = ready(b, now + 10)
    assert b.reply(again, "state")["stopped"] is None


def test_anybody_may_stop_it(a: Client, b: Client) -> None:
    now = ready(a)
    motion = a.go(now, "reset", joints=START.tolist())
    a.live(now, now + 0.1)
    stopped = b.reply(now + 0.1, "stop")
    assert "does not hold it" in stopped["stopped"]
    assert a.controller.interrupted(motion)
    assert a.controller.finish(motion, now + 0.1)["code"] == "stopped"
    assert a.reply(now + 0.2, "stop")["stopped"] == stopped["stopped"]  # the first reason is kept
    assert a.controller.holder == "client 1"


def test_one_motion_at_a_time(a: Client) -> None:
    now = ready(a)
    motion = a.go(now, "move", deltas=[0.01] * 7)
    assert a.reply(now + 0.01, "move", deltas=[0.01] * 7)["code"] == "refused"
    assert a.reply(now + 0.01, "reset", joints=HOME.tolist())["code"] == "refused"
    again = a.go(motion.end, "move", deltas=[0.01] * 7)
    a.reply(again.end, "stop")
    assert a.controller.finish(again, again.end)["ok"]  # it had ended before
    now = ready(a, again.end)
    motion = a.go(now, "reset", joints=START.tolist())
    assert a.reply(now + 0.1, "release")["holder"] is None  # given back while it moves
    assert a.controller.interrupted(motion)


def test_too_fast_is_refused_and_changes_nothing(a: Client) -> None:
    now = ready(a)
    deltas = np.zeros(7)
    deltas[3] = 1.01 * VELOCITY_MAX[3] * CONTROL_SECONDS
    assert a.reply(now, "move", deltas=deltas.tolist(), close_gripper=True)["code"] == "refused"
    state = a.reply(now + 1, "state")
    np.testing.assert_allclose(state["joints"], HOME)
    assert state["gripper_closed"] is False


def test_what_makes_no_sense_is_not_answered(a: Client) -> None:
    for op, fields in (("dance", {}), ("acquire", {}), ("reset", {"joints": [1]}), ("move", {"deltas": "x"})):
        with pytest.raises(ProtocolError):
            a.ask(0.0, op, **fields)


@given(st.lists(st.lists(st.floats(-1, 1), min_size=7, max_size=7), max_size=30))
def test_an_arm_keeps_its_limits(moves: list[list[float]]) -> None:
    arm = SimulatedArm(speed=2.0)
    now = arm.reset(HOME, 0.0)
    for share in moves:
        before = arm.joints(now)
        now = arm.move(np.array(share) * VELOCITY_MAX * CONTROL_SECONDS, None, now)
        after = arm.joints(now)
        assert ((after >= JOINT_MIN) & (after <= JOINT_MAX)).all()
        assert hand_pose(after[:, None])[0][2, 0] > 0
        half = arm.joints(now - CONTROL_SECONDS / 4)
        np.testing.assert_allclose(half, (before + after) / 2, atol=1e-12)


def test_periods_of_a_simulated_arm_have_one_length() -> None:
    arm = SimulatedArm()
    now = arm.reset(HOME, 0.0)
    half = np.full(7, 0.5) * VELOCITY_MAX * CONTROL_SECONDS
    first = arm.move(half, None, now)
    second = arm.move(half, None, first + 0.004)
    assert second == pytest.approx(first + CONTROL_SECONDS)
    np.testing.assert_array_equal(arm.joints(second), arm.target(second))
    # What was late is made up for, but not faster than a joint can be.
    assert arm.move(-2 * half, None, second + 0.004) == pytest.approx(second + 0.004 + CONTROL_SECONDS)
    late = arm.move(half, None, 1.0)
    assert late == pytest.approx(1.0 + CONTROL_SECONDS)


def test_silence_stops_a_moving_arm_within_two_periods(a: Client, b: Client) -> None:
    now = ready(a)
    motion = a.go(now, "reset", joints=START.tolist())
    a.live(now, now + 0.2)
    assert a.controller.due(motion, now + 0.2) == pytest.approx(now + 0.2 + WATCHDOG_SECONDS)
    # However late somebody looks, the arm has stopped when the silence was too long.
    state = b.reply(now + 0.9, "state")
    np.testing.assert_allclose(state["joints"], HOME + (0.2 + WATCHDOG_SECONDS) / RESET_TAKES * (START - HOME))
    assert state["still_tick"] - state["heard_tick"] <= 2
    assert state["holder"] == "client 1"
    assert a.controller.finish(motion, now + 0.9)["code"] == "silent"
    again = a.go(now + 1, "reset", joints=START.tolist())
    a.live(now + 1, again.end)
    np.testing.assert_allclose(a.controller.finish(again, again.end)["joints"], START)
    assert a.reply(again.end + 1.5, "state")["stopped"] is None  # silence at rest is none of its business


def test_controller_that_was_held_up_blames_itself(controller: Controller, a: Client, b: Client) -> None:
    controller.looked = 0.0
    a.acquire(0.0)
    a.go(0.0, "reset", joints=START.tolist())
    controller.watch(0.05)
    controller.watch(3.05)
    got = b.reply(3.05, "state")
    assert got["stopped"] == "the controller was held up for 3 s while the arm moved"
    assert got["still_tick"] <= got["heard_tick"]
    # What they sent meanwhile is read now: they still hold it, and may reset it.
    assert got["holder"] == "client 1"
    a.go(3.06, "reset", joints=START.tolist())
    for look in np.arange(3.07, 3.3, 0.01):
        controller.watch(float(look))
    assert "client 1 sent nothing for 0.1 s" in b.reply(3.3, "state")["stopped"]


def test_an_action_that_was_under_way_for_too_long_is_refused(a: Client) -> None:
    now = ready(a)
    clock = a.reply(now, "state")["clock"]
    # The sender waited for a second before it sent it: that is not the link's time.
    a.go(now + 1.05, "move", deltas=[0.01] * 7, after=clock, waited=1.0)
    late = a.reply(now + 2, "move", deltas=[0.01] * 7, after=clock, waited=1.8)
    assert late["code"] == "late"
    assert "200 ms" in late["message"]
    np.testing.assert_allclose(a.reply(now + 2, "state")["joints"], HOME + 0.01)
    with pytest.raises(ProtocolError, match="waited"):
        a.ask(now + 2, "move", deltas=[0.01] * 7, after=clock, waited="long")


def test_the_hand_stays_in_the_workspace_of_controller_and_job() -> None:
    hand = hand_pose(HOME[:, None])[0][:, 0]
    controller = Controller(SimulatedArm(), workspace=Box((-1, -1, 0), (1, 1, 2)))
    client = Client(controller, A)
    corners = [(hand - 0.02).tolist(), (hand + 0.02).tolist()]
    assert client.reply(0.0, "acquire", holder="a", heartbeat=2.0, workspace=corners)["ok"]
    motion = client.go(0.0, "reset", joints=HOME.tolist())
    now, clipped = motion.end, 0
    deltas = np.zeros(7)
    deltas[1] = 0.05
    for _ in range(20):
        motion = client.go(now, "move", deltas=deltas.tolist())
        now = motion.end
        state = controller.finish(motion, now)
        clipped += state["clipped"]
        reached = hand_pose(np.array(state["joints"])[:, None])[0][:, 0]
        assert (np.abs(reached - hand) <= 0.02 + 1e-9).all()
    assert clipped > 10
    refused = client.reply(now, "reset", joints=START.tolist())
    assert refused["code"] == "refused"
    assert "workspace" in refused["message"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(string.printable, max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=10), json_values, max_size=4))
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
        (
            Acquiring,
            ACQUIRE,
            "workspace",
            [None],
            [[], [[0, 0, 0]], [[0, 0, 0], [1, 1, 0]], [[0] * 3, [1, 1, "x"]], [[0, 0], [1, 1]], "", 1],
        ),
        (Acquiring, ACQUIRE, "gripper", [None], ["hand", {}, *({"type": name} for name in (7, "a\nb"))]),
        (Acquiring, ACQUIRE, "gripper", [], [{"type": "a", "connection": 1}]),
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
    assert known(asked.gripper).model_dump() == hand
    assert asked.workspace == Box((0, 0, 0), (1, 2, 3))
