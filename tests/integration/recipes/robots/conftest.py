"""Simulated arms' controllers, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlinf_core.hardware.franka import Franka
from tests.integration.recipes.robots.fci.fci_rig import Server, own_address, start_controller

StartArm = Callable[..., tuple[Franka, subprocess.Popen[str]]]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Controllers that a test has started; they end with it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def start_arm(started: list[subprocess.Popen[str]]) -> StartArm:
    """Starts the controller of an arm: what the configuration would say of it, and its process."""

    def start(host: str = "127.0.0.1", speed: float = 1.0, port: int = 0) -> tuple[Franka, subprocess.Popen[str]]:
        command = [sys.executable, "-m", "recipes.embodied.robots.controller.simulated_controller", "--host", host]
        words: Any = [*command, "--port", str(port), "--speed", str(speed)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("listening on "), (line, process.communicate())
        return Franka(node_rank=0, robot_ip=host, robot_port=int(line.rpartition(":")[2])), process

    return start


@pytest.fixture
def patient(request: pytest.FixtureRequest) -> bool:
    """Whether the server overlooks lost cycles; a test asks for it by its parameter."""
    return bool(getattr(request, "param", False))


@pytest.fixture
def server(patient: bool) -> Iterator[Server]:
    """A server of Franka's control interface."""
    made = Server(own_address(), patient=patient)
    yield made
    made.end()


@pytest.fixture
def control(server: Server, started: list[subprocess.Popen[str]]) -> StartArm:
    """Starts our controller of the server's arm: what the configuration would say of it, and its process."""

    def start(*options: str) -> tuple[Franka, subprocess.Popen[str]]:
        arm, process = start_controller(server.address, *options)
        started.append(process)
        return arm, process

    return start
