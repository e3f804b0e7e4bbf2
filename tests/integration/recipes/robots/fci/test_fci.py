"""The controller of a real arm over Franka's control interface, against a public server of it; see `fci_rig.py`."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSpec, FloatArray
from recipes.embodied.envs.real.driver import RobotDriver
from recipes.embodied.envs.real.driver_contract import check_driver
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP
from recipes.embodied.robots.franka_kinematics import HOME
from recipes.embodied.robots.replies import ArmState
from recipes.embodied.robots.robot_errors import RobotError, RobotLateError, RobotRefusedError
from rlinf_core import GenericRobot
from rlinf_core.hardware.robots.franka import Franka
from tests.integration.recipes.robots.fci.fci_rig import NEEDS_FCI, STARTED, Server, spawn_controller
from tests.waiting import until

pytestmark = [*NEEDS_FCI, pytest.mark.timeout(300)]
Control = Callable[..., tuple[Franka, subprocess.Popen[str]]]
STEP = ACTION_STEP[:, 0]
STANDS = 0.2  # simulated seconds of an arm of 0.4 rad/s: 20 lost cycles, and braking
BRAKES = 0.35  # at twice that speed, by the arm's own stop

# Holds the arm, and moves its first joint to and fro without end.
HOLDER = """
import itertools, sys
import numpy as np
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP
from recipes.embodied.robots.franka_kinematics import HOME
from rlinf_core.hardware.robots.franka import Franka

client = FrankaClient(Franka(node_rank=0, robot_ip="127.0.0.1", robot_port=int(sys.argv[1])))
client.acquire()
client.reset(HOME)
for step in itertools.count():
    client.move(ACTION_STEP[:, 0] * [0.8 if step % 40 < 20 else -0.8, 0, 0, 0, 0, 0, 0])
    print(step, flush=True)
"""


def ready(arm: Franka) -> FrankaClient:
    client = FrankaClient(arm)
    client.acquire()
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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_arm_without_its_controller_stands_in_cycles(server: Server, control: Control, how: signal.Signals) -> None:
    arm, process = control()
    client = ready(arm)
    swing(client, 12, 0.35)
    assert server.report()["speed"] > 0.2
    process.send_signal(how)
    server.run(1.0)
    report = server.report()
    assert 0 <= report["still"] - report["command"] <= STANDS, report
    assert report["speed"] < 0.02
    client.close()
    if how == signal.SIGKILL:
        client = FrankaClient(control()[0])
    else:
        process.send_signal(signal.SIGCONT)
        client = FrankaClient(arm)
        until(lambda: client.state().mode == "reflex", "a reflex", 20)
        assert "communication_constraints_violation" in str(client.state().stopped)
    client.acquire(10)
    assert client.reset(HOME).stopped is None
    assert client.move(np.zeros(7)).mode == "move"
    client.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_arm_whose_holder_is_gone_stands(server: Server, control: Control, how: signal.Signals) -> None:
    arm, _ = control()
    words = [sys.executable, "-c", HOLDER, str(arm.robot_port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder, FrankaClient(arm) as watcher:
        assert holder.stdout is not None
        for line in holder.stdout:
            if line == "12\n":
                break
        holder.send_signal(how)
        until(lambda: watcher.state().stopped is not None, "a stop", 20)
        server.run(1.0)
        report, why = server.report(), watcher.state().stopped
        holder.kill()
    assert 0 <= report["still"] - report["command"] <= BRAKES, report
    assert report["errors"] == []
    assert f"process {holder.pid}" in str(why)


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
