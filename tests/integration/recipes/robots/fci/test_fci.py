"""Our controller at a server of Franka's control interface: motion, limits and learning."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSpec, FloatArray
from recipes.embodied.envs.real.driver import RobotDriver, check_driver
from recipes.embodied.robots.controller.fci_arm import FciArm
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP, CONTROL_SECONDS, HOME, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.robot_errors import RobotError, RobotLateError, RobotRefusedError, RobotStoppedError
from recipes.embodied.robots.wire_protocol import ArmState
from rlinf_core import GenericRobot
from rlinf_core.hardware.franka import Franka
from tests.integration.recipes.robots.fci.fci_rig import NEEDS_FCI, STARTED, Server, spawn_controller
from tests.rlinf_command import OURS, rlinf
from tests.waiting import until

pytestmark = [*NEEDS_FCI, pytest.mark.timeout(300)]

Control = Callable[..., tuple[Franka, subprocess.Popen[str]]]
STEP = ACTION_STEP[:, 0]


def ready(arm: Franka) -> FrankaClient:
    client = FrankaClient(arm)
    client.acquire(10)
    client.reset(HOME)
    return client


def moved(client: FrankaClient, deltas: NDArray[np.float64]) -> ArmState:
    """Move, again where this process was held up for so long that the controller refused."""
    while True:
        try:
            return client.move(deltas)
        except RobotLateError:
            client.state()


def swing(client: FrankaClient, steps: int, share: float) -> None:
    for _ in range(steps):
        moved(client, STEP * [share, 0, 0, 0, 0, 0, 0])


def test_sixty_moves_are_executed_as_targets(control: Control) -> None:
    arm, _ = control()
    with ready(arm) as client:
        goal = client.state().target
        for step in range(60):
            deltas = STEP * np.array([0.4, 0, 0, 0.1, 0, 0, 0]) * (1 if step // 15 % 2 == 0 else -1)
            state = moved(client, deltas)
            np.testing.assert_allclose(state.target - goal, deltas, atol=1e-9)
            goal = state.target
            assert (state.mode, state.stopped, state.clipped) == ("move", None, False)
            assert state.success_rate > 0.5
        until(lambda: np.abs(client.state().joints - goal).max() < 0.02, "an arrival", 10)


def test_a_policy_that_thinks_for_long_is_no_reflex(server: Server, control: Control) -> None:
    arm, _ = control()
    with ready(arm) as client:
        swing(client, 8, 0.8)
        server.run(0.4)
        state = moved(client, np.zeros(7))
        assert (state.mode, state.stopped) == ("move", None)


def test_a_number_that_is_none_stops_the_arm(control: Control) -> None:
    arm, _ = control()
    with ready(arm) as client:
        with pytest.raises(RobotRefusedError, match="not finite"):
            client.move(np.full(7, np.nan))
        assert client.state().stopped is not None
        client.reset(HOME)
        assert client.move(np.zeros(7)).stopped is None


def test_a_second_controller_is_refused_by_name(server: Server, control: Control) -> None:
    control()
    second = spawn_controller(server.address)
    _, output = second.communicate(timeout=STARTED)
    assert second.returncode == 1
    assert "another client of the FCI holds it" in output
    assert server.address in output


def test_another_version_of_the_interface_is_named() -> None:
    address = f"127.0.{os.getpid() % 250 + 1}.253"
    with socket.create_server((address, 1337)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                # Header of command, number and length; status 1 is an incompatible library, 7 the server's version.
                connection.sendall(struct.pack("<IIIBH", 0, 0, 15, 1, 7))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        refused = spawn_controller(address)
        _, output = refused.communicate(timeout=STARTED)
        thread.join(10)
    assert refused.returncode == 1
    assert "version" in output
    assert "franka-rs 0.4.0 speaks versions 10, 5" in output


class WiredArm(RobotDriver):
    """The arm as a driver of a user's own would move it."""

    def __init__(self, robot: GenericRobot, arm: Franka) -> None:
        super().__init__(robot, None)
        self.client = FrankaClient(arm)
        self.client.acquire(10)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(state_size=7, action_size=7)

    def reset(self, seed: int) -> None:
        self.client.reset(HOME)

    def move(self, action: FloatArray) -> FloatArray:
        before = self.client.state().target
        return ((self.client.move(STEP * action).target - before) / STEP).astype(np.float32)

    def observe(self) -> Mapping[str, NDArray[Any]]:
        return {"states": self.client.state().joints.astype(np.float32)}

    def stop(self) -> None:
        try:
            self.client.stop()
        except RobotError:
            assert self.client.closed

    def close(self) -> None:
        self.stop()
        self.client.close()


def test_an_arm_with_mass_keeps_the_promises_of_drivers(control: Control) -> None:
    arm, _ = control()
    made: list[WiredArm] = []

    def make() -> WiredArm:
        made.append(WiredArm(GenericRobot(node_rank=0, address="arm", driver="a:B"), arm))
        return made[-1]

    check_driver(make)
    assert all(driver.client.closed for driver in made)


OVERSHOOT = 0.02  # radians, or metres of the hand, by which an arm with mass may be beyond its target
BOX = ((0.2, -0.1, 0.3), (0.45, 0.1, 0.6))


def push(client: FrankaClient, action: NDArray[np.float64]) -> bool:
    """Move by an action; returns whether a limit made it shorter."""
    return moved(client, STEP * action).clipped


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


EPISODES = 3


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("patient", [True], indirect=True)
def test_demonstrations_become_a_policy(patient: bool, control: Control, tmp_path: Path) -> None:
    assert patient
    arm, _ = control()
    overrides = [
        f"cluster.node_groups[0].hardware.configs[0].robot_port={arm.robot_port}",
        "env.eval.rollout_epoch=1",
    ]

    here = partial(rlinf, tmp_path, env=os.environ | OURS)
    demonstrations = ("-o", "demonstrations/reach", "-n", str(EPISODES), "--successes-only")
    here("record", "embodied/franka-rlpd-1arm", *overrides, *demonstrations)
    short = ["runner.max_steps=3", "runner.val_check_interval=3", "runner.save_interval=3"]
    here("train", "embodied/franka-rlpd-1arm", *overrides, *short, "runner.logger.log_path=runs")
    (folder,) = (tmp_path / "runs").iterdir()
    metrics: dict[str, Any] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics |= json.loads(line)["metrics"]
    assert metrics["replay/demonstrations"] >= EPISODES
    assert metrics["train/updates"] == 4 * (3 * 50 - 100)
    here("eval", str(folder))
