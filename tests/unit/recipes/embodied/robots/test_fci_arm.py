"""The arm over Franka's control interface, with a stand-in for franka-rs, and the thread for calls that block."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from recipes.embodied.robots.controller import fci_arm, franka_controller
from recipes.embodied.robots.controller.controller import Controller, Motion
from recipes.embodied.robots.controller.fci_arm import FciArm, FciOptions, WorkerThread
from recipes.embodied.robots.controller.franka_controller import connect_arm
from recipes.embodied.robots.franka_arm import ACTION_STEP, CONTROL_SECONDS, HOME, JOINT_MAX, JOINT_MIN
from recipes.embodied.robots.robot_errors import RobotCheckError, RobotError, RobotUnreachableError
from recipes.embodied.robots.wire_protocol import ControllerRequest
from tests.unit.recipes.embodied.robots import fake_franka
from tests.waiting import until

STEP = ACTION_STEP[:, 0]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "franka", fake_franka.module())
    monkeypatch.setattr(fake_franka.Robot, "busy", None)
    monkeypatch.setattr(fake_franka.Robot, "version", 10)


@pytest.fixture
def arm() -> Iterator[FciArm]:
    made = connect_arm("10.0.0.2", FciOptions())
    yield made
    made.close()


def robot() -> fake_franka.Robot:
    return fake_franka.Robot.made


def settle(arm: FciArm) -> None:
    """Wait until the arm's thread has nothing to do."""
    until(lambda: arm._worker.idle and arm._fingers.idle, "a thread without a job", 10, pause=0.001)


def ready(arm: FciArm, now: float = 0.0) -> float:
    """Reset the arm to its home; returns a moment after that."""
    end = arm.reset(HOME, now)
    settle(arm)
    arm.poll(end)
    return end


def test_limits_are_set_in_the_arm_when_it_is_connected(arm: FciArm) -> None:
    made = connect_arm("10.0.0.2", FciOptions(torque=30.0, force=25.0))
    assert robot().limits == ([30.0] * 7, [30.0] * 7, [25.0] * 6, [25.0] * 6)
    assert made.firmware == "Franka Research 3, FCI 10, server 10, franka-rs 0.4.0"
    assert robot().calls == []
    assert (made.low >= JOINT_MIN).all()
    assert (made.high <= JOINT_MAX).all()
    assert made.low[3] == FciOptions().elbow


def test_a_reset_recovers_and_goes_slowly(arm: FciArm) -> None:
    robot().q = HOME - 0.5
    arm.poll(0.0)
    settle(arm)
    arm.poll(0.0)
    end = arm.reset(HOME, 0.0)
    assert arm.moves(0.0)
    settle(arm)
    assert robot().calls == ["recover"]
    ((way, dt),) = robot().ways
    assert len(way) * dt == pytest.approx(end, abs=2 * dt)
    assert np.abs(np.diff(way, axis=0)).max() <= 0.25 * 2.61 * dt + 1e-9
    assert robot().options["fraction"] == 0.5
    assert robot().hand.did == ["open 0.0795"]
    arm.poll(end)
    assert not arm.moves(end)
    assert arm.stopped is None


def test_a_reset_waits_until_the_arm_has_braked(arm: FciArm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fci_arm, "_REST_SECONDS", 0.05)
    robot().dq = np.full(7, 0.5)
    arm.reset(HOME, 0.0)
    settle(arm)
    assert robot().ways == []
    assert "it moves 0.05 s after its motion ended" in str(arm.stopped)
    robot().dq = np.zeros(7)
    ready(arm)
    assert arm.stopped is None


def test_arm_that_trembles_about_its_place_stands(arm: FciArm) -> None:
    now = ready(arm)
    robot().dq = np.full(7, 0.08)
    arm.poll(now + 1)
    assert arm.moves(now + 1)
    robot().time, robot().q = 0.03, HOME + 1e-4
    arm.poll(now + 2)
    assert not arm.moves(now + 2)
    assert arm.still_since == now + 1
    robot().time, robot().q = 0.06, HOME + 0.01
    arm.poll(now + 3)
    assert arm.moves(now + 3)


def test_a_reset_that_does_not_arrive_stops_the_arm(arm: FciArm) -> None:
    robot().q, robot().held = HOME - 0.5, True
    settle(arm)
    end = arm.reset(HOME, 0.0)
    settle(arm)
    arm.poll(end)
    assert arm.moves(end)
    arm.poll(end + 60)
    assert "may hold it" in str(arm.stopped)


def test_executed_is_the_change_of_the_target(arm: FciArm) -> None:
    now = ready(arm)
    robot().held = True
    end = arm.move(STEP, None, now)
    assert end == pytest.approx(now + CONTROL_SECONDS)
    np.testing.assert_allclose(arm.target(end), HOME + STEP)
    np.testing.assert_allclose(arm.joints(end), HOME)
    assert not arm.clipped
    # The target of an arm that somebody holds does not run away.
    for _ in range(50):
        end = arm.move(STEP, None, end)
    assert arm.clipped
    assert np.abs(arm.target(end) - HOME).max() < 1.0


def test_periods_have_one_length_however_long_the_policy_thinks(arm: FciArm) -> None:
    now = ready(arm)
    first = arm.move(0 * STEP, None, now)
    assert arm.move(0 * STEP, None, first + 0.02) == pytest.approx(first + CONTROL_SECONDS)
    late = first + CONTROL_SECONDS + 0.4
    assert arm.move(0 * STEP, None, late) == pytest.approx(late + CONTROL_SECONDS)
    assert arm.stopped is None


def test_a_reflex_stops_it_with_the_reason_until_a_reset(arm: FciArm) -> None:
    now = ready(arm)
    robot().loop.reflex("cartesian_reflex", "joint_velocity_violation")
    arm.poll(now)
    assert arm.stopped == "the arm ended its motion: cartesian_reflex, joint_velocity_violation"
    settle(arm)
    assert robot().calls == ["recover"]
    with pytest.raises(ValueError, match="follows no target"):
        arm.move(STEP, None, now)
    ready(arm, now)
    assert robot().calls == ["recover", "recover"]
    assert arm.stopped is None


def test_reset_connects_again_after_the_arm_was_gone(arm: FciArm, monkeypatch: pytest.MonkeyPatch) -> None:
    now, before = ready(arm), robot()
    before.gone, before.loop.running = True, False
    for moment in (now, now + 0.1, now + 0.2):
        arm.poll(moment)
        settle(arm)
    assert "UDP receive: Timeout" in str(arm.stopped)
    assert arm.mode == "disconnected"
    monkeypatch.setattr(fake_franka.Robot, "version", 11)
    arm.reset(HOME, now)
    settle(arm)
    assert "version 11 of the FCI was not tried" in str(arm.stopped)
    monkeypatch.setattr(fake_franka.Robot, "version", 10)
    now = ready(arm, now)
    assert (arm.stopped, arm.mode) == (None, "move")
    assert robot() is not before
    assert robot().limits == before.limits
    assert robot().hand.did == ["open 0.0795"]
    arm.move(STEP, None, now)
    np.testing.assert_allclose(arm.target(now), HOME + STEP)


@pytest.mark.parametrize("kind", ["broken", "refuses"])
def test_reset_connects_again_only_when_requests_cannot_be_sent(arm: FciArm, kind: str) -> None:
    now, before = ready(arm), robot()
    setattr(before, kind, True)
    before.loop.reflex("communication_constraints_violation")
    arm.poll(now)
    settle(arm)
    assert "communication_constraints_violation" in str(arm.stopped)
    if kind == "broken":
        ready(arm, now)
        assert (arm.stopped, arm.mode) == (None, "move")
        assert robot() is not before
        assert robot().calls == ["recover"]
    else:
        arm.reset(HOME, now)
        settle(arm)
        assert "command not possible" in str(arm.stopped)
        assert robot() is before


def test_reset_without_an_answer_ends(arm: FciArm) -> None:
    go = threading.Event()
    robot().automatic_error_recovery = lambda: go.wait(10)  # type: ignore[method-assign]
    arm.reset(HOME, 0.0)
    arm.poll(60.0)
    assert arm.stopped == "its control unit has not answered a reset"
    go.set()
    settle(arm)
    assert robot().ways == []


def test_a_reflex_before_a_stop_is_told_besides(arm: FciArm) -> None:
    now = ready(arm)
    robot().loop.reflex("communication_constraints_violation")
    arm.stop("process 7 sent nothing for 0.1 s", now)
    settle(arm)
    assert arm.stopped is not None
    assert arm.stopped.startswith("process 7")
    assert arm.stopped.endswith("the arm ended its motion: communication_constraints_violation")


def test_a_stop_gives_up_a_reset_that_has_not_begun(arm: FciArm) -> None:
    begun, go = threading.Event(), threading.Event()

    def recover() -> None:
        begun.set()
        go.wait(10)

    robot().automatic_error_recovery = recover  # type: ignore[method-assign]
    arm.reset(HOME + 0.1, 0.0)
    assert begun.wait(10)
    arm.stop("somebody asked for it", 0.1)
    go.set()
    settle(arm)
    assert robot().ways == []
    assert arm.stopped == "somebody asked for it"


def test_the_gripper_moves_on_a_thread_of_its_own(arm: FciArm) -> None:
    now = ready(arm)
    for close in (True, True, None, False):
        now = arm.move(0 * STEP, close, now)
        settle(arm)
    assert robot().hand.did == ["open 0.0795", "grasp 40", "open 0.0795"]
    robot().hand.broken = True
    arm.move(0 * STEP, True, now)
    settle(arm)
    assert arm.stopped == "the arm failed: the hand does not answer"


def test_a_controller_answers_with_target_and_measured_joints() -> None:
    arm = connect_arm("10.0.0.2", FciOptions())
    controller = Controller(arm)

    def ask(now: float, op: str, **fields: Any) -> Any:
        return controller.handle(1, ControllerRequest(op, 5, fields), now)

    assert ask(0.0, "ping")["controller"] == "rlinf-franka"
    assert ask(0.0, "acquire", holder="a", heartbeat=2.0)["stopped"] == "it has just been switched on"
    reset = ask(0.0, "reset", joints=HOME.tolist())
    settle(arm)
    controller.watch(reset.end)
    assert controller.ended(reset, reset.end)
    robot().held = True
    robot().dq = np.full(7, 0.5)
    now = reset.end
    motion = ask(now, "move", deltas=STEP.tolist())
    assert isinstance(motion, Motion)
    # It is answered when the period is over, though the arm still moves; the next action needs no rest.
    assert controller.ended(motion, motion.end)
    reply = controller.finish(motion, motion.end)
    np.testing.assert_allclose(reply["target"], HOME + STEP)
    np.testing.assert_allclose(reply["joints"], HOME)
    assert (reply["mode"], reply["success_rate"], reply["still_tick"]) == ("move", 0.99, None)
    again = ask(motion.end, "move", deltas=STEP.tolist())
    assert isinstance(again, Motion)
    robot().loop.reflex("cartesian_reflex")
    controller.watch(motion.end + 0.01)
    refused = controller.finish(again, motion.end + 0.01)
    assert refused["code"] == "stopped"
    assert "cartesian_reflex" in refused["message"]
    arm.close()


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "franka", None)
    assert franka_controller.main(["--fci", "10.0.0.2"]) == 1
    err = capsys.readouterr().err
    assert "franka-rs" in err
    assert "rlinf-cli[franka]" in err


@pytest.mark.parametrize(
    ("library", "fci", "address", "error", "words"),
    [
        *(
            (version, 10, "10.0.0.2", RobotCheckError, f"franka-rs {version} was not tried")
            for version in ("0.3.9", "0.5.0", "newest")
        ),
        ("0.4.0", 11, "10.0.0.2", RobotCheckError, "version 11 of the FCI"),
        ("0.4.0", 10, "nowhere", RobotUnreachableError, r"(?s)Connection to FCI refused.*activate FCI"),
    ],
)
def test_what_cannot_be_connected_is_named(
    monkeypatch: pytest.MonkeyPatch, library: str, fci: int, address: str, error: type[RobotError], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "franka", fake_franka.module(library))
    monkeypatch.setattr(fake_franka.Robot, "version", fci)
    with pytest.raises(error) as caught:
        connect_arm(address, FciOptions())
    assert re.search(words, str(caught.value))


def test_a_second_client_does_not_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = threading.Event()
    monkeypatch.setattr(fake_franka.Robot, "busy", busy)
    monkeypatch.setattr(franka_controller, "CONNECT_SECONDS", 0.05)
    try:
        with pytest.raises(RobotUnreachableError, match="another client of the FCI holds it"):
            connect_arm("10.0.0.2", FciOptions())
    finally:
        busy.set()


def test_it_is_idle_only_when_every_job_has_ended() -> None:
    worker, ended = WorkerThread("jobs", lambda _: None), list[int]()
    interval = sys.getswitchinterval()
    # Threads take turns at almost every instruction.
    sys.setswitchinterval(1e-6)
    try:
        for number in range(2000):
            worker.submit(partial(ended.append, number))
            while not worker.idle:
                pass
            assert len(ended) == number + 1
    finally:
        sys.setswitchinterval(interval)


def test_a_job_that_fails_is_reported_and_the_next_runs() -> None:
    errors, ran = list[str](), threading.Event()
    worker = WorkerThread("jobs", lambda error: errors.append(str(error)))
    worker.submit(lambda: [][0])
    worker.submit(ran.set)
    assert ran.wait(60)
    until(lambda: worker.idle, "the end of both jobs")
    assert errors == ["list index out of range"]
