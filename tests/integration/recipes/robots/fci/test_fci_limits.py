"""Limits that a holder violates on purpose, on the route to a real arm, and reflexes; see `fci_rig.py`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.robots.controller.fci_arm import FciArm
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP, CONTROL_SECONDS
from recipes.embodied.robots.franka_kinematics import HOME, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.robot_errors import RobotLateError, RobotRefusedError, RobotStoppedError
from rlinf_core.hardware.robots.franka import Franka
from tests.integration.recipes.robots.fci.fci_rig import NEEDS_FCI, Server
from tests.waiting import until

pytestmark = [*NEEDS_FCI, pytest.mark.timeout(300)]
Control = Callable[..., tuple[Franka, subprocess.Popen[str]]]
STEP = ACTION_STEP[:, 0]
OVERSHOOT = 0.02  # radians, or metres of the hand, by which an arm with mass may be beyond its target
BOX = ((0.2, -0.1, 0.3), (0.45, 0.1, 0.6))


def ready(arm: Franka) -> FrankaClient:
    client = FrankaClient(arm)
    client.acquire(10)
    client.reset(HOME)
    return client


def push(client: FrankaClient, action: NDArray[np.float64]) -> bool:
    """Move by an action, again where this process was held up; returns whether a limit made it shorter."""
    while True:
        try:
            return client.move(STEP * action).clipped
        except RobotLateError:
            client.state()


@pytest.mark.parametrize("sign", [-1, 1])
def test_joints_end_at_their_limits_without_a_reflex(server: Server, control: Control, sign: int) -> None:
    arm, _ = control()
    with ready(arm) as client:
        action = np.zeros(7)
        action[[0, 4, 6]] = sign  # they lead nowhere below the table
        limits = (FciArm.low if sign < 0 else FciArm.high)[[0, 4, 6]]
        until(lambda: push(client, action) and (client.state().target[[0, 4, 6]] == limits).all(), "all limits", 120)
        until(lambda: client.state().still_tick is not None, "an arm that stands", 30)
        state, report = client.state(), server.report()
        assert (state.mode, state.stopped, report["errors"]) == ("move", None, [])
        for joints in (state.target, np.array(report["joints"])):
            assert (joints >= FciArm.low - OVERSHOOT).all()
            assert (joints <= FciArm.high + OVERSHOOT).all()


def test_velocity_beyond_the_joints_is_refused(server: Server, control: Control) -> None:
    arm, _ = control()
    with ready(arm) as client:
        before = client.state().target
        for share in (1.01, 10.0, -3.0):
            with pytest.raises(RobotRefusedError, match="rejected") as caught:
                client.move(share * VELOCITY_MAX * CONTROL_SECONDS)
            assert "cannot move that far in one control period" in str(caught.value.why)
            assert f"{arm.robot_ip}:{arm.robot_port}" in str(caught.value.where)
        np.testing.assert_array_equal(client.state().target, before)
        # The fastest that is allowed, to and fro in every period: shaped within the arm's limits, no reflex.
        for step in range(40):
            push(client, np.full(7, 2.0 if step % 2 else -2.0) * [1, 0.2, 1, 0.2, 1, 0.2, 1])
        report = server.report()
        assert report["errors"] == []
        assert report["fastest"] <= 0.5 * VELOCITY_MAX.max() * 1.05


def test_hand_stays_in_its_workspace(server: Server, control: Control) -> None:
    arm, _ = control("--workspace", ",".join(str(number) for corner in BOX for number in corner))
    random = np.random.default_rng(0)
    with ready(arm) as client:
        clipped, far = 0, 0.0
        for _ in range(12):
            action = random.choice([-1.0, 1.0], 7)
            for _ in range(10):
                clipped += push(client, action)
                hand = hand_pose(np.array(server.report()["joints"])[:, None])[0][:, 0]
                far = max(far, float(np.maximum(BOX[0] - hand, hand - BOX[1]).max()))
        assert clipped > 20
        assert far <= OVERSHOOT
        assert server.report()["errors"] == []


@pytest.mark.parametrize("reflex", ["cartesian_reflex", "joint_reflex"])
def test_reflex_of_the_arm_reaches_its_holder_by_name(server: Server, control: Control, reflex: str) -> None:
    arm, _ = control()
    with ready(arm) as client:
        for _ in range(5):
            push(client, np.array([0.5, 0, 0, 0, 0, 0, 0]))
        server.report(reflex)
        until(lambda: client.state().stopped is not None, "a stop", 20)
        with pytest.raises(RobotStoppedError) as caught:
            push(client, np.array([0.5, 0, 0, 0, 0, 0, 0]))
        assert reflex in str(caught.value.why)
        assert client.reset(HOME).stopped is None
        assert not push(client, np.zeros(7))
