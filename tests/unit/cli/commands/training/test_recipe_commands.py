"""Commands of recipes: `rlinf robot`, `rlinf venv`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.robots import manual_control
from recipes.embodied.robots.controller.arm import SimulatedArm, SimulatedCameras
from recipes.embodied.robots.controller.controller import Controller
from recipes.embodied.robots.controller.controller_server import Server
from recipes.embodied.robots.controller_client import FrankaClient, holder_name
from recipes.embodied.robots.franka_arm import HOME
from rlinf_cli.main import main
from rlinf_core.hardware.franka import Franka
from tests.unit.cli.typed import Cli, text_file

FILE = """
cluster:
  num_nodes: 1
  node_groups:
    - label: arms
      node_ranks: 0
      hardware:
        type: Franka
        configs: [{{node_rank: 0, robot_ip: 127.0.0.1, robot_port: {port}, camera_serials: [{camera}]}}]
"""


class Person(PersonSource):
    """Pushes forward some times, and is done."""

    def __init__(self, env: Any, options: Any) -> None:
        from recipes.embodied.config.intervention_types import PersonOptions

        super().__init__(env, PersonOptions(release_steps=0))
        self.controls = [Controls((1, 0, 0))] * 3 + [Controls(), Controls(verdict="success")]

    def poll(self) -> Controls:
        return self.controls.pop(0)


@pytest.fixture
def arm() -> Iterator[Franka]:
    """A fast arm whose controller listens on loopback, as long as the test takes."""
    loop = asyncio.new_event_loop()
    server = Server(Controller(SimulatedArm(1000.0), SimulatedCameras(["c1"])))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    host, port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result(30)
    yield Franka(node_rank=0, robot_ip=host, robot_port=port)
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


@pytest.fixture
def file(arm: Franka, tmp_path: Path) -> str:
    path = text_file(tmp_path / "robot.yaml", FILE.format(port=arm.robot_port, camera="c1"))
    return str(path)


@pytest.fixture(autouse=True)
def _a_busy_machine_is_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recipes.embodied.robots.controller_client.FrankaClient.latency", lambda self, count: [0.001] * count
    )  # type: ignore[misc]
    monkeypatch.setattr(manual_control, "SECONDS", 30.0)
    for name in ("WATCHDOG_SECONDS", "LATE_SECONDS"):
        monkeypatch.setattr(f"recipes.embodied.robots.controller.controller.{name}", 1000.0)


def test_an_arm_from_switching_on_to_a_stop(file: str, arm: Franka, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str, code: int = 0) -> str:
        assert main(["robot", *arguments]) == code, capsys.readouterr().err
        return capsys.readouterr().out

    address = f"{arm.robot_ip}:{arm.robot_port}"
    (listed,) = json.loads(said("list", file, "--json"))["robots"]
    assert listed == {
        "group": "arms",
        "type": "Franka",
        "node": 0,
        "address": address,
        "controller": "rlinf-simulated 3.0",
        "state": "stopped: it has just been switched on",
        "holder": None,
        "cameras": [],
    }
    checks = json.loads(said("check", file, address, "--json"))["checks"]
    assert {check["name"]: check["verdict"] for check in checks} == {
        "controller": "ok",
        "link": "ok",
        "limits": "ok",
        "workspace": "skipped",
        "cameras": "ok",
        "lease": "ok",
    }
    assert "at home" in said("reset", file, "0")
    with FrankaClient(arm) as client:
        np.testing.assert_allclose(client.state().joints, HOME)
    device = f"{__name__}:Person"
    assert "moved for 3 control periods" in said("teleop", file, "--device", device)
    with FrankaClient(arm) as client:
        state = client.state()
    assert np.abs(state.joints - HOME).max() > 0.01
    assert state.holder is None
    assert "stopped until reset" in said("stop", file)
    assert "asked for it" in said("list", file)


def test_arm_held_by_a_job_can_only_be_watched_and_stopped(
    file: str, arm: Franka, capsys: pytest.CaptureFixture[str]
) -> None:
    with FrankaClient(arm, seconds=30.0) as job:
        job.acquire()
        for command in ("reset", "teleop"):
            assert main(["robot", command, file]) == 1
            err = capsys.readouterr().err
            assert f"{arm.robot_ip}:{arm.robot_port}" in err
            assert str(job.state().holder) in err
        assert main(["robot", "check", file]) == 1
        assert "holds the arm" in capsys.readouterr().out
        job.reset(HOME)
        assert main(["robot", "stop", file]) == 0
        assert job.state().stopped


def test_a_fault_is_told_and_nothing_moves(arm: Franka, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = text_file(tmp_path / "robot.yaml", FILE.format(port=arm.robot_port, camera="c9"))
    assert main(["robot", "check", str(path)]) == 1
    assert "c9 is not connected" in capsys.readouterr().out
    assert main(["robot", "reset", str(path)]) == 1
    assert "not ready to move" in capsys.readouterr().err
    with FrankaClient(arm) as client:
        assert client.state().stopped == "it has just been switched on"


@contextlib.contextmanager
def crowd(arm: Franka, words: bytes = b"") -> Iterator[None]:
    """Forty connections to a controller, each of which has said something."""
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            member = stack.enter_context(socket.create_connection((arm.robot_ip, arm.robot_port), timeout=30))
            with contextlib.suppress(OSError):
                member.sendall(words)
        yield


@pytest.mark.parametrize("words", [b"", b'{"op": "ping", "id": 1}\n'], ids=["silent", "talking"])
def test_stop_gets_through_a_crowd(arm: Franka, file: str, words: bytes) -> None:
    with crowd(arm, words):
        assert main(["robot", "stop", file]) == 0


def test_crowd_does_not_close_the_holder(arm: Franka) -> None:
    with FrankaClient(arm) as client:
        client.acquire()
        with crowd(arm), socket.create_connection((arm.robot_ip, arm.robot_port), timeout=30) as watcher:
            watcher.sendall(b'{"op": "state", "id": 1}\n')
            assert f'"holder":"{holder_name()}"'.encode() in watcher.makefile("rb").readline()
            assert client.state().holder == holder_name()


def test_connection_that_says_nothing_first_is_closed(arm: Franka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.embodied.robots.controller.controller_server.FIRST_SECONDS", 0.01)
    with socket.create_connection((arm.robot_ip, arm.robot_port), timeout=30) as silent:
        assert silent.recv(1) == b""


def test_arms_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = text_file(tmp_path / "robot.yaml", FILE.format(port=1, camera="c1"))
    assert main(["robot", "check", str(path)]) == 1
    assert "does not respond" in capsys.readouterr().out
    assert main(["robot", "list", str(path)]) == 0
    assert "refused" in capsys.readouterr().out
    assert main(["robot", "stop", str(path)]) == 1
    assert main(["robot", "reset", str(path), "10.9.9.9"]) == 1
    assert "no such arm" in capsys.readouterr().err
    path.write_text("cluster: {num_nodes: 1}\n")
    assert main(["robot", "reset", str(path)]) == 1
    assert "declares no hardware" in capsys.readouterr().err
    assert main(["robot", "list", str(path)]) == 0


# Run by the interpreter of the tests: the check itself, of another simulator than LIBERO.
STAND_IN = f"""
import runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[5])!r})
from recipes.embodied.envs import registry
from recipes.embodied.envs.processes import simulator
from tests.unit.recipes.embodied.envs.fake_simulators import FakeEnv
registry.env_class = lambda name: FakeEnv
simulator.options_of = lambda kind, written: kind.options_model()
sys.argv = sys.argv[3:]
print("a line of the simulator's own")
runpy.run_module("recipes.embodied.interpreters.start_check", run_name="__main__")
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """The folder of an interpreter whose LIBERO is a stand-in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run.py").write_text(STAND_IN)
    python = text_file(tmp_path / "bin/python", f'#!/bin/sh\nexec {sys.executable} {tmp_path}/run.py "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_an_unknown_simulator_is_refused_before_anything_is_made(cli: Cli) -> None:
    ended = cli("env", "setup", "metawrold")
    assert ended.code != 0
    assert "metaworld" in ended.err


def test_each_task_is_tried_at_starts_spread_over_its_list(interpreter: Path, cli: Cli) -> None:
    out = cli.out("env", "check", "libero", "many", "--starts", "2", "--path", str(interpreter), "--json")
    tasks = json.loads(out)["tasks"]
    assert [(task["set"], task["task"], task["starts"], task["faults"]) for task in tasks] == [
        ("many", name, [0, 2], []) for name in ("one", "two", "three")
    ]


def test_a_start_that_does_not_hold_is_named_and_exits_with_1(interpreter: Path, cli: Cli) -> None:
    out = cli.printed(1, "env", "check", "libero", "one", "two", "--starts", "4", "--path", str(interpreter))
    assert [line.split()[:4] for line in out.splitlines()[-4:-2]] == [
        ["one", "1", "4", "4"],
        ["two", "1", "4", "2"],
    ]
    assert out.splitlines()[-2:] == [f"two, start {n}: `cup on plate` does not hold" for n in (1, 3)]


@pytest.mark.parametrize("env_type", ["metaworld", "gymnasium", "franka_kin", "my_lab.envs:Own"])
def test_a_simulator_that_draws_its_starts_has_none_to_check(env_type: str, cli: Cli) -> None:
    err = cli.fails(2, "env", "check", env_type)
    assert f"`{env_type}` has no stored starts to check" in err
    assert "starts are stored for `libero`" in err


def test_an_interpreter_without_the_simulator_is_an_error(tmp_path: Path, cli: Cli) -> None:
    assert "rlinf venv setup libero" in cli("env", "check", "libero", "--path", str(tmp_path)).err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/bin/false")
    assert "it printed nothing" in cli("env", "check", "libero", "--path", str(tmp_path)).err
