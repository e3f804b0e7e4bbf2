"""Simulated arms' controllers, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlinf_core.hardware.robots.franka import Franka

StartArm = Callable[..., tuple[Franka, subprocess.Popen[str]]]


@pytest.fixture
def start_arm() -> Iterator[StartArm]:
    """Starts the controller of an arm: what the configuration would say of it, and its process."""
    started: list[subprocess.Popen[str]] = []

    def start(host: str = "127.0.0.1", speed: float = 1.0, port: int = 0) -> tuple[Franka, subprocess.Popen[str]]:
        command = [sys.executable, "-m", "recipes.embodied.robots.controller.simulated_controller", "--host", host]
        words: Any = [*command, "--port", str(port), "--speed", str(speed)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("listening on "), (line, process.communicate())
        taken = int(line.rpartition(":")[2])
        return Franka(node_rank=0, robot_ip=host, robot_port=taken), process

    yield start
    for process in started:
        process.kill()
        process.communicate()
