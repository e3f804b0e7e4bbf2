"""A public server of Franka's control interface and our controller over it, each a process of its own.

python3.11 -m venv V && V/bin/pip install -e . franka-rs==0.4.0 franka-sim==1.1.7
RLINF_TEST_FCI=V/bin/python FR3_MJCF=fr3.xml pytest -m nightly tests/integration/recipes/robots/fci/test_fci.py

`FR3_MJCF` is a model of the arm for MuJoCo. The server imposes the limits of motion and counts lost cycles. All times
are its simulated ones, so a busy machine changes nothing; for that the controller is scheduled as one of a real arm is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.hardware.robots.franka import Franka
from tests.waiting import until

PYTHON, MODEL = os.environ.get("RLINF_TEST_FCI", ""), os.environ.get("FR3_MJCF", "")
ROOT = Path(__file__).parents[5]
STARTED = 60.0  # seconds within which a process must have started
# The loop of 1 kHz must not wait for the other processes of this machine: 20 ms of that are a reflex.
_REALTIME = ("chrt", "-f", "10") if os.geteuid() == 0 and shutil.which("chrt") else ()

NEEDS_FCI = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_FCI names no interpreter with franka-rs and franka-sim"),
    pytest.mark.skipif(not MODEL, reason="FR3_MJCF names no model of the arm"),
]


class Server:
    """The server of the interface, in a process of its own; a `patient` one overlooks lost cycles."""

    def __init__(self, address: str, *, patient: bool = False) -> None:
        self.address = address
        program = Path(__file__).with_name("fci_server.py")
        self.process = subprocess.Popen(
            [PYTHON, str(program), address, *(["patient"] if patient else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: self.report()["now"] > 0, "a simulated arm", STARTED)

    def report(self, reflex: str = "") -> dict[str, Any]:
        """Return the server's record; with the name of a `reflex` that ends the motion first."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{reflex}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, seconds: float) -> None:
        """Wait until that much simulated time has passed."""
        end = self.report()["now"] + seconds
        until(lambda: self.report()["now"] > end, "simulated time", STARTED)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def own_address() -> str:
    """Return an address of loopback that no other test run uses."""
    return f"127.0.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250 + 1}"


def spawn_controller(address: str, *options: str) -> subprocess.Popen[str]:
    """Start our controller of the arm at an address; it may refuse."""
    words = [PYTHON, "-m", "recipes.embodied.robots.controller.franka_controller", "--fci", address, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*_REALTIME, *words, "--realtime", "ignore", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def start_controller(address: str, *options: str) -> tuple[Franka, subprocess.Popen[str]]:
    """Start our controller; returns what the configuration would say of its arm, and its process."""
    process = spawn_controller(address, *options)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), process.communicate()
    return Franka(node_rank=0, robot_ip="127.0.0.1", robot_port=int(line.rpartition(":")[2])), process
