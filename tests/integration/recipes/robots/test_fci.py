"""The controller of a real arm over Franka's control interface, against a public server of it; skipped without one.

python3.11 -m venv V && V/bin/pip install -e . franka-rs==0.4.0 franka-sim==1.1.7
RLINF_TEST_FCI=V/bin/python FR3_MJCF=fr3.xml pytest -m nightly tests/integration/recipes/robots/test_fci.py

`FR3_MJCF` is a model of the arm for MuJoCo. The server imposes the limits of motion and counts lost cycles. All times
are its simulated ones, so a busy machine changes nothing; for that the controller is scheduled as one of a real arm is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
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
from recipes.embodied.robots.robot_errors import RobotError, RobotRefusedError
from rlinf_core import GenericRobot
from rlinf_core.hardware.robots.franka import Franka
from tests.waiting import until

PYTHON, MODEL = os.environ.get("RLINF_TEST_FCI", ""), os.environ.get("FR3_MJCF", "")
ROOT = Path(__file__).parents[4]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_FCI names no interpreter with franka-rs and franka-sim"),
    pytest.mark.skipif(not MODEL, reason="FR3_MJCF names no model of the arm"),
    pytest.mark.timeout(300),
]
STEP = ACTION_STEP[:, 0]
# The loop of 1 kHz must not wait for the other processes of this machine: 20 ms of that are a reflex.
REALTIME = ("chrt", "-f", "10") if os.geteuid() == 0 and shutil.which("chrt") else ()
STARTED = 60.0  # seconds within which a process must have started
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


class Server:
    """The server of the interface, in a process of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        program = Path(__file__).with_name("fci_server.py")
        self.process = subprocess.Popen(
            [PYTHON, str(program), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: self.report()["now"] > 0, "a simulated arm", STARTED)

    def report(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, seconds: float) -> None:
        """Wait until that much simulated time has passed."""
        end = self.report()["now"] + seconds
        until(lambda: self.report()["now"] > end, "simulated time", STARTED)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(f"127.0.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250 + 1}")
    yield made
    made.process.kill()
    made.process.communicate()


Control = Callable[..., tuple[Franka, subprocess.Popen[str]]]


def controller(address: str, *options: str) -> subprocess.Popen[str]:
    words = [PYTHON, "-m", "recipes.embodied.robots.controller.franka_controller", "--fci", address, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*REALTIME, *words, "--realtime", "ignore", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.fixture
def control(server: Server) -> Iterator[Control]:
    """Starts a controller of the arm: what the configuration would say of it, and its process."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> tuple[Franka, subprocess.Popen[str]]:
        process = controller(server.address, *options)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), process.communicate()
        return Franka(node_rank=0, robot_ip="127.0.0.1", robot_port=int(line.rpartition(":")[2])), process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ready(arm: Franka) -> FrankaClient:
    client = FrankaClient(arm)
    client.acquire()
    client.reset(HOME)
    return client


def swing(client: FrankaClient, steps: int, share: float) -> None:
    for _ in range(steps):
        client.move(STEP * [share, 0, 0, 0, 0, 0, 0])


def test_sixty_moves_are_executed_as_targets(control: Control) -> None:
    arm, _ = control()
    with ready(arm) as client:
        goal = client.state().target
        for step in range(60):
            deltas = STEP * np.array([0.4, 0, 0, 0.1, 0, 0, 0]) * (1 if step // 15 % 2 == 0 else -1)
            state = client.move(deltas)
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
    assert report["speed"] < 5e-3
    if how == signal.SIGKILL:
        client.close()
        client = FrankaClient(control()[0])
    else:
        process.send_signal(signal.SIGCONT)
        until(lambda: client.state().mode == "reflex", "a reflex", 20)
        assert "communication_constraints_violation" in str(client.state().stopped)
    client.acquire()
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
        state = client.move(np.zeros(7))
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
    second = controller(server.address)
    _, told = second.communicate(timeout=STARTED)
    assert second.returncode == 1
    assert "another client of the FCI holds it" in told
    assert server.address in told


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
        refused = controller(address)
        _, told = refused.communicate(timeout=STARTED)
        thread.join(10)
    assert refused.returncode == 1
    assert "version" in told
    assert "franka-rs 0.4.0 speaks versions 10, 5" in told


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
