"""An arm over the network: one holder, deadlines, and a safe stop whatever happens to the holder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.franka.franka_kin import FrankaKinEnv
from recipes.embodied.envs.real import franka_robot
from recipes.embodied.envs.real.franka_robot import FrankaRobotEnv
from recipes.embodied.envs.registry import make_env
from recipes.embodied.robots.controller_client import FrankaClient, holder_name
from recipes.embodied.robots.franka_arm import HOME, JOINT_MAX, JOINT_MIN
from recipes.embodied.robots.robot_errors import (
    RobotError,
    RobotLeaseError,
    RobotLinkLostError,
    RobotStoppedError,
    RobotUnreachableError,
)
from recipes.embodied.robots.wire_protocol import ArmState
from rlinf_core.errors import ConfigError
from rlinf_core.hardware.franka import Franka
from tests.waiting import until

# Far away for a slow arm, half a minute: what happens on the way is seen on the way.
FAR = np.where(HOME > 0, JOINT_MIN, JOINT_MAX) * 0.9
SLOW = 0.2
SOON = 30.0  # seconds within which something must have happened

# Holds the arm, and begins a long way.
HOLDER = """
import sys
from recipes.embodied.robots.controller_client import FrankaClient
from rlinf_core.hardware.franka import Franka
from tests.waiting import until

client = FrankaClient(Franka(node_rank=0, robot_ip=sys.argv[1], robot_port=int(sys.argv[2])), heartbeat=2.0)
client.acquire()
client.reset([float(each) for each in sys.argv[3:]])
"""


def hold(arm: Franka) -> subprocess.Popen[str]:
    """Return a process that holds the arm, which is on its way."""
    words = [sys.executable, "-c", HOLDER, arm.robot_ip, str(arm.robot_port), *map(str, FAR)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    with FrankaClient(arm) as watcher:
        wait_until_on_its_way(watcher)
    return process


def wait_until_on_its_way(watcher: FrankaClient) -> None:
    until(lambda: np.abs(watcher.state().joints - HOME).max() >= 1e-2, "a move of the arm", SOON)


def wait_for_stop(watcher: FrankaClient) -> ArmState:
    until(
        lambda: watcher.state().stopped is not None and watcher.state().holder is None, "a stop without a holder", SOON
    )
    return watcher.state()


@pytest.fixture
def clients() -> Iterator[Any]:
    opened: list[FrankaClient] = []

    def connect(arm: Franka, **options: Any) -> FrankaClient:
        opened.append(FrankaClient(arm, **options))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


def test_the_second_client_is_told_who_holds_the_arm(start_arm: Any, clients: Any) -> None:
    arm, _ = start_arm(speed=1000)
    first, second = clients(arm), clients(arm)
    first.acquire()
    with pytest.raises(RobotLeaseError, match="holds the arm") as caught:
        second.acquire()
    assert caught.value.holder == holder_name()
    assert str(os.getpid()) in str(caught.value)
    assert f"{arm.robot_ip}:{arm.robot_port}" in str(caught.value)
    assert caught.value.help
    with pytest.raises(RobotLeaseError, match="does not hold the arm"):
        second.reset(HOME)
    first.release()
    second.acquire()
    np.testing.assert_allclose(second.reset(HOME).joints, HOME)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_arm_whose_holder_is_gone_stops_on_its_way(start_arm: Any, clients: Any, how: signal.Signals) -> None:
    arm, _ = start_arm(speed=SLOW)
    watcher = clients(arm)
    process = hold(arm)
    try:
        assert watcher.state().holder == f"process {process.pid} on {holder_name().partition(' on ')[2]}"
        process.send_signal(how)
        state = wait_for_stop(watcher)
    finally:
        process.kill()
        process.communicate()
    why = "sent nothing for 0.1 s while the arm moved" if how == signal.SIGSTOP else "connection"
    assert why in str(state.stopped)
    assert np.abs(state.joints - HOME).max() > 1e-3
    assert np.abs(state.joints - FAR).max() > 0.1
    np.testing.assert_array_equal(watcher.state().joints, state.joints)
    watcher.acquire()
    with pytest.raises(RobotStoppedError, match=f"process {process.pid}") as caught:
        watcher.move(np.zeros(7))
    assert "reset" in str(caught.value.help)
    assert watcher.reset(state.joints).stopped is None
    watcher.move(np.zeros(7))


def test_somebody_else_stops_the_arm(start_arm: Any, clients: Any) -> None:
    arm, _ = start_arm(speed=SLOW)
    holder, passer_by = clients(arm), clients(arm)
    holder.acquire()

    def stop_on_the_way() -> None:
        wait_until_on_its_way(passer_by)
        passer_by.stop()

    thread = threading.Thread(target=stop_on_the_way)
    thread.start()
    with pytest.raises(RobotStoppedError, match="asked for it"):
        holder.reset(FAR)
    thread.join()
    assert holder.reset(holder.state().joints).stopped is None


def test_a_holder_that_has_nothing_to_say_keeps_the_arm(start_arm: Any, clients: Any) -> None:
    arm, _ = start_arm(speed=1000)
    holder, other = clients(arm, heartbeat=2.0), clients(arm)
    holder.acquire()
    holder.reset(HOME)
    time.sleep(3)  # more than a heartbeat
    with pytest.raises(RobotLeaseError):
        other.acquire()
    holder.move(np.zeros(7))


def test_a_controller_that_ends_is_a_lost_link(start_arm: Any, clients: Any) -> None:
    arm, process = start_arm(speed=1000)
    client = clients(arm)
    client.acquire()
    process.terminate()
    assert process.wait(SOON) == 0
    for _ in range(2):
        with pytest.raises(RobotLinkLostError, match=f"{arm.robot_ip}:{arm.robot_port}") as caught:
            client.state()
        assert caught.value.help
    with pytest.raises(RobotUnreachableError, match="refused") as unreachable:
        clients(arm)
    assert "simulated_controller" in str(unreachable.value.help)


def test_the_controller_is_told_of_the_gripper(start_arm: Any, clients: Any) -> None:
    arm, _ = start_arm(speed=1000)
    arm = arm.model_copy(update={"gripper_type": "robotiq", "gripper_connection": "/dev/ttyUSB0"})
    client = clients(arm)
    client.acquire()
    assert client._request("state")["gripper"] == {"type": "robotiq", "connection": "/dev/ttyUSB0"}


def test_every_call_has_a_deadline(start_arm: Any, clients: Any) -> None:
    arm, process = start_arm(speed=1000)
    client = clients(arm)
    client.acquire()
    client._seconds = 0.5
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RobotLinkLostError, match=r"no response within 0\.5 s"):
        client.state()
    with pytest.raises(RobotUnreachableError, match=r"no response within 0\.5 s"):
        clients(arm, seconds=0.5)


def test_what_listens_there_is_something_else(clients: Any) -> None:
    for answer in (b"SSH-2.0-OpenSSH_9.6\r\n", b'{"id": 1, "ok": true, "robot": "toaster"}\n', b"x" * 10_000, b""):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            arm = Franka(node_rank=3, robot_ip="127.0.0.1", robot_port=port, controller_node_rank=5)

            def reply(listener: socket.socket = listener, answer: bytes = answer) -> None:
                with listener.accept()[0] as connection:
                    connection.recv(100)
                    connection.sendall(answer)

            thread = threading.Thread(target=reply)
            thread.start()
            with pytest.raises(RobotUnreachableError, match="of node 3, controller on node 5") as caught:
                clients(arm, seconds=SOON)
            assert not answer or "not an rlinf controller" in str(caught.value.why)
            thread.join()


def test_garbage_ends_its_own_connection_only(start_arm: Any, clients: Any) -> None:
    arm, process = start_arm(speed=1000)
    holder = clients(arm)
    holder.acquire()
    holder.reset(HOME)
    random = np.random.default_rng(0)
    lines = [
        b"GET / HTTP/1.1\r\nHost: arm\r\n\r\n",
        b"\x00" * 100 + b"\n",
        b"[" * 4000 + b"\n",
        b"x" * 100_000,
        b'{"op": "move", "id": 1, "deltas": [NaN]}\n',
        b'{"op": "acquire", "id": 1, "holder": "\\u001b[2J", "heartbeat": 2}\n',
        b'{"op": "acquire", "id": 1, "holder": "me", "heartbeat": 1e999}\n',
        b'{"op": "dance", "id": 1}\n',
        *(random.bytes(200) + b"\n" for _ in range(20)),
    ]
    for line in lines:
        with socket.create_connection((arm.robot_ip, arm.robot_port), timeout=SOON) as connection:
            try:
                connection.sendall(line)
                reply = connection.makefile("rb").readline()
            except ConnectionError:
                continue  # closed before all of it was taken
            if reply:
                assert json.loads(reply)["code"] == "bad-request"
    with socket.create_connection((arm.robot_ip, arm.robot_port), timeout=SOON) as connection:
        connection.sendall(b'{"op": "stop"')  # cut off: no request, so no stop
    state = holder.move(np.zeros(7))
    assert state.stopped is None
    assert state.holder == holder_name()
    assert process.poll() is None


def test_hundred_connections_lock_out_nobody(start_arm: Any, clients: Any) -> None:
    arm, _ = start_arm(speed=1000)
    holder = clients(arm)
    holder.acquire()
    holder.reset(HOME)
    idle = [socket.create_connection((arm.robot_ip, arm.robot_port), timeout=SOON) for _ in range(100)]
    try:
        assert holder.move(np.zeros(7)).stopped is None
        assert clients(arm, seconds=SOON).stop().stopped == "a client that does not hold it asked for it"
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--port", "70000"], 2, "70000"),
        (["--speed", "0"], 2, "`0`"),
        (["--host", "203.0.113.1", "--port", "0"], 1, "cannot listen on 203.0.113.1:0"),
    ],
)
def test_a_controller_that_cannot_start_says_why(arguments: list[str], status: int, said: str) -> None:
    words = [sys.executable, "-m", "recipes.embodied.robots.controller.simulated_controller", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


class TestEnvironment:
    """`env_type: franka_robot`."""

    def make(self, arm: Franka, **settings: Any) -> FrankaRobotEnv:
        env = make_env("franka_robot", EnvSettings(**{"num_envs": 1, "hardware": (arm,), **settings}))
        assert isinstance(env, FrankaRobotEnv)
        return env

    def test_it_is_the_kinematic_arm_on_a_robot(self, start_arm: Any) -> None:
        """The same starts, observations, rewards and ends for the same actions."""
        arm, _ = start_arm(speed=1000)
        settings = {"seed": 5, "max_episode_steps": 8, "task": "reach", "first_env": 3}
        robot, kin = self.make(arm, **settings), FrankaKinEnv(EnvSettings(num_envs=1, **settings))
        try:
            np.testing.assert_allclose(robot.reset()["states"], kin.reset()["states"], atol=1e-6)
            actions = np.random.default_rng(0).normal(size=(10, 1, 2, 7)).astype(np.float32)
            for action in actions:
                ours, theirs = robot.step(action), kin.step(action)
                np.testing.assert_allclose(ours.observations["states"], theirs.observations["states"], atol=1e-5)
                np.testing.assert_allclose(ours.rewards, theirs.rewards, atol=1e-5)
                np.testing.assert_array_equal(ours.dones, theirs.dones)
            assert robot.spec == kin.spec
        finally:
            robot.close()

    def test_training_and_evaluation_take_turns_on_one_arm(self, start_arm: Any) -> None:
        arm, _ = start_arm(speed=1000)
        train, evaluation = self.make(arm, max_episode_steps=100), self.make(arm, seed=9)
        train.reset()
        before = train.step(np.full((1, 1, 7), 0.3, np.float32)).observations["states"]
        evaluation.reset()
        evaluation.step(np.full((1, 1, 7), -0.5, np.float32))
        after = train.step(np.zeros((1, 1, 7), np.float32)).observations["states"]
        np.testing.assert_allclose(after, before, atol=1e-6)
        train.close()
        evaluation.step(np.zeros((1, 1, 7), np.float32))
        evaluation.close()
        evaluation.close()
        with FrankaClient(arm) as watcher:
            state = watcher.state()
        assert (state.holder, state.stopped) == (None, None)  # given back, not lost

    def test_another_process_holds_the_arm(self, start_arm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(franka_robot, "LEASE_PATIENCE", 0.3)
        arm, _ = start_arm(speed=SLOW)
        process = hold(arm)
        try:
            with pytest.raises(RobotLeaseError, match=f"process {process.pid}"):
                self.make(arm)
        finally:
            process.kill()
            process.communicate()

    def test_it_waits_for_an_arm_whose_holder_is_just_ending(self, start_arm: Any) -> None:
        arm, _ = start_arm(speed=SLOW)
        process = hold(arm)
        timer = threading.Timer(1.0, process.kill)
        timer.start()
        self.make(arm).close()
        timer.join()
        process.communicate()
        # It had the arm until it was killed, and not by its own will.
        assert process.returncode == -signal.SIGKILL

    def test_after_a_lost_link_a_new_environment_has_a_new_one(self, start_arm: Any) -> None:
        arm, process = start_arm(speed=1000)
        env = self.make(arm)
        env.reset()
        process.kill()
        process.wait(SOON)
        with pytest.raises(RobotLinkLostError):
            env.step(np.zeros((1, 1, 7), np.float32))
        start_arm(speed=1000, port=arm.robot_port)
        again = self.make(arm)
        again.reset()
        env.close()
        again.step(np.zeros((1, 1, 7), np.float32))
        again.close()

    def test_no_controller(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            arm = Franka(node_rank=0, robot_ip="127.0.0.1", robot_port=listener.getsockname()[1])
        with pytest.raises(RobotUnreachableError):
            self.make(arm)

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"hardware": ()}, "owns none"),
            (
                {"hardware": (Franka(node_rank=0, robot_ip="10.0.0.1"), Franka(node_rank=0, robot_ip="10.0.0.2"))},
                "owns 2",
            ),
            ({"num_envs": 4}, "not 4"),
            ({"task": "pick"}, "`pick`"),
        ],
    )
    def test_what_it_cannot_be_is_refused(self, settings: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            self.make(Franka(node_rank=0, robot_ip="127.0.0.1"), **settings)


def test_errors_travel_between_processes() -> None:
    import pickle

    for error in (RobotLeaseError("taken", holder="me", where="arm"), RobotStoppedError("a child ran by")):
        back = pickle.loads(pickle.dumps(error))
        assert isinstance(back, RobotError)
        assert str(back) == str(error)
        assert back.__dict__ == error.__dict__
