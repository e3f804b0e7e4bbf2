"""A public server of Franka's control interface and our controller over it, each a process of its own.

python3.11 -m venv V && V/bin/pip install -e . franka-rs==0.4.0 franka-sim==1.1.7
RLINF_TEST_FCI=V/bin/python FR3_MJCF=fr3.xml pytest -m nightly tests/integration/recipes/robots/fci/test_fci.py

`FR3_MJCF` is a model of the arm for MuJoCo. The server imposes the limits of motion and counts lost cycles. All times
are its simulated ones, so a busy machine changes nothing; for that the controller is scheduled as one of a real arm is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.embodied.off_policy.segments import read_segments
from recipes.embodied.robots.robot_errors import RobotError
from rlinf_core.hardware.franka import Franka
from tests.waiting import until

PYTHON, MODEL = os.environ.get("RLINF_TEST_FCI", ""), os.environ.get("FR3_MJCF", "")
ROOT = Path(__file__).parents[5]
STARTED = 60.0  # seconds within which a process must have started
TOLD = 90.0  # seconds: a limit for a holder that hangs; a reset may take 60
LOST_CYCLES = 20e-3  # simulated seconds: cycles without a command after which the arm itself stops
# Simulated seconds of braking: of the reflex, and of the arm's own stop, from the fastest that these actions ask for.
BRAKES = 0.35
STILL = 0.02  # radians per second, in the mean of 20 cycles
# The loop of 1 kHz must not wait for the other processes of this machine: 20 ms of that are a reflex.
REALTIME = ("chrt", "-f", "10") if os.geteuid() == 0 and shutil.which("chrt") else ()

NEEDS_FCI = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_FCI names no interpreter with franka-rs and franka-sim"),
    pytest.mark.skipif(not MODEL, reason="FR3_MJCF names no model of the arm"),
]


class Server:
    """The server of the interface, in a process of its own; a `patient` one overlooks lost cycles.

    Args:
        address: where it listens.
        patient: see `fci_server.py`.
        within: what runs the process, such as `ip netns exec NAME`.
    """

    def __init__(self, address: str, *, patient: bool = False, within: Sequence[str] = ()) -> None:
        self.address, self.within = address, within
        program = Path(__file__).with_name("fci_server.py")
        self.process = subprocess.Popen(
            [*within, PYTHON, str(program), address, *(["patient"] if patient else [])],
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
        [*REALTIME, *words, "--realtime", "ignore", *options],
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


class Holder:
    """A process that holds the arm and records what it does."""

    def __init__(self, arm: Franka, folder: Path, seed: int, kind: str, attempt: int = 0) -> None:
        self.folder = folder
        words = [
            "-m",
            "tests.integration.recipes.robots.fci.fci_holder",
            str(arm.robot_port),
            str(folder),
            str(seed),
            kind,
        ]
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        self.kind, self.attempt, self.reports = kind, attempt, list[tuple[str, Any]]()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, value = line.partition(" ")
            # The last line of a killed process may be torn.
            with contextlib.suppress(ValueError):
                self.reports.append((word, json.loads(value)))

    def of(self, word: str) -> list[Any]:
        return [value for known, value in list(self.reports) if known == word]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(20)

    def check_recording(self) -> None:
        """Compare what is on disk with what was told of; the last one may be recorded and not told yet."""
        messages = [np.array(numbers) for numbers in self.of("moved")]
        kept = [record["numbers"] for record in read_segments(self.folder)] if self.folder.exists() else []
        assert len(messages) <= len(kept) <= len(messages) + 1
        for ours, theirs in zip(messages, kept, strict=False):
            assert np.array_equal(ours.astype(theirs.dtype), theirs)


def check_named(error: RobotError | list[str], arm: Franka, *causes: str) -> None:
    """Check that an error says which arm, one of the causes, and what to do."""
    text, where, why, remedy = (
        error if isinstance(error, list) else (str(error), error.where or "", error.why or "", error.help or "")
    )
    assert f"Franka arm {arm.robot_ip}:{arm.robot_port}" in where
    assert any(cause in f"{text} {why}" for cause in causes), error
    assert remedy


class Rig:
    """A server and our controller over it, started again where a fault has ended them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.arm, self.controller = start_controller(server.address)

    def mend(self) -> None:
        """Start again what was killed."""
        if self.server.process.poll() is not None:
            self.server = Server(self.server.address, within=self.server.within)
        if self.controller.poll() is not None:
            self.controller.communicate()
            self.arm, self.controller = start_controller(self.server.address)

    def end(self) -> None:
        self.controller.kill()
        self.controller.communicate()
        self.server.end()


def log_figures(**figures: Any) -> None:
    """Append figures to the file that RLINF_TEST_LOG names."""
    with Path(os.environ.get("RLINF_TEST_LOG", os.devnull)).open("a") as log:
        log.write(json.dumps(figures) + "\n")
