"""What a controller decides, moment by moment: who holds the arm, where it is, when it stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.embodied.robots.controller.arm import RESET_SPEED
from recipes.embodied.robots.controller.controller import WATCHDOG_SECONDS, Controller, Motion, within
from recipes.embodied.robots.controller.simulated_arm import FRAME_SECONDS, SimulatedArm, SimulatedCameras
from recipes.embodied.robots.franka_arm import CONTROL_SECONDS
from recipes.embodied.robots.franka_kinematics import HOME, JOINT_MAX, JOINT_MIN, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.wire_protocol import Box, ControllerRequest, Message, ProtocolError

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
    for wrong in (["robotiq"], {"connection": "/dev/ttyUSB0"}, {"type": "robotiq", "connection": 3}):
        with pytest.raises(ProtocolError, match="gripper"):
            a.ask(0.3, "acquire", holder="a", heartbeat=2.0, gripper=wrong)


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


def test_a_motion_that_had_ended_was_not_interrupted(a: Client) -> None:
    now = ready(a)
    motion = a.go(now, "move", deltas=[0.01] * 7)
    a.reply(motion.end, "stop")
    assert a.controller.finish(motion, motion.end)["ok"]


def test_one_motion_at_a_time(a: Client) -> None:
    now = ready(a)
    motion = a.go(now, "move", deltas=[0.01] * 7)
    assert a.reply(now + 0.01, "move", deltas=[0.01] * 7)["code"] == "refused"
    assert a.reply(now + 0.01, "reset", joints=HOME.tolist())["code"] == "refused"
    a.go(motion.end, "move", deltas=[0.01] * 7)


def test_given_back_while_it_moves_it_stops(a: Client) -> None:
    now = ready(a)
    motion = a.go(now, "reset", joints=START.tolist())
    assert a.reply(now + 0.1, "release")["holder"] is None
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
    for wrong in ([[0, 0, 0]], [[0, 0, 0], [0, 0, 0]], "box", [[0, 0, 0], [1, 1, "x"]]):
        with pytest.raises(ProtocolError, match="workspace"):
            client.ask(now, "acquire", holder="a", heartbeat=2.0, workspace=wrong)


def test_boxes_have_in_common_what_is_in_both() -> None:
    first, second = Box((0, 0, 0), (2, 2, 2)), Box((1, -1, 1), (3, 1, 3))
    assert within(first, second) == Box((1, 0, 1), (2, 1, 2))
    assert within(None, second) == within(second, None) == second
    assert within(None, None) is None


def test_cameras_take_frames_until_they_freeze() -> None:
    cameras = SimulatedCameras(["c1", "c2"])
    assert all(0 <= age <= FRAME_SECONDS for age in cameras.ages(1.234).values())
    cameras.freeze("c2", 2.0)
    ages = cameras.ages(5.0)
    assert ages["c1"] <= FRAME_SECONDS
    assert 3 <= ages["c2"] <= 3 + FRAME_SECONDS
