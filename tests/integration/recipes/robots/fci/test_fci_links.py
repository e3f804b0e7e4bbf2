"""A link between an arm and its controller that loses, delays or cuts off packets; see `fci_rig.py` and `fci_link.py`.

The interface drops a command that is not back within its millisecond; twenty in a row stop the arm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_kinematics import HOME
from recipes.embodied.robots.replies import ArmState
from tests.integration.recipes.robots.fci.fci_rig import (
    BRAKES,
    LOST_CYCLES,
    NEEDS_FCI,
    REALTIME,
    STILL,
    TOLD,
    Holder,
    Rig,
    Server,
    check_named,
    log_figures,
)
from tests.waiting import until

MOMENTS: Final = int(os.environ.get("RLINF_TEST_MOMENTS", "6"))
pytestmark = [*NEEDS_FCI, pytest.mark.netns, pytest.mark.timeout(120 + 60 * MOMENTS)]


class Link:
    """A namespace, and the link to it."""

    def __init__(self) -> None:
        number = os.getpid() % 16_000
        self.namespace = f"rlinf-arm-{os.getpid()}"
        self.near, self.far = (f"10.77.{number // 63}.{number % 63 * 4 + side}" for side in (1, 2))
        subprocess.run(["ip", "netns", "add", self.namespace], check=True)
        subprocess.run(["ip", "-n", self.namespace, "link", "set", "lo", "up"], check=True)
        words = ["-m", "tests.integration.recipes.robots.fci.fci_link", self.namespace, self.near, self.far]
        self._process = subprocess.Popen(
            [*REALTIME, sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._await_ready()

    def _await_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def set(self, *, delay: float = 0.0, lost: float = 0.0) -> None:
        """Delay packets by seconds, and lose a share of them, in each direction."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay} {lost}\n")
        self._process.stdin.flush()
        self._await_ready()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        subprocess.run(["ip", "netns", "delete", self.namespace], check=True)


class LinkedRig(Rig):
    """A server in a namespace, and our controller on this side of the link."""

    def __init__(self, link: Link) -> None:
        super().__init__(Server(link.far, within=("ip", "netns", "exec", link.namespace)))
        self.link = link


@pytest.fixture(scope="module")
def rig() -> Iterator[LinkedRig]:
    with ExitStack() as stack:
        link = Link()
        stack.callback(link.end)
        made = LinkedRig(link)
        stack.callback(made.end)
        yield made


def begun(rig: LinkedRig, folder: Path, seed: int, moves: int) -> Holder:
    """Return a holder of the arm that has moved it so often; another one where a busy machine stopped the arm."""
    rig.link.set()
    for attempt in range(5):
        holder = Holder(rig.arm, folder / f"steps-{attempt}", seed, "client", attempt)
        until(lambda holder=holder: len(holder.of("moved")) >= moves or holder.of("ended"), "a moving arm", TOLD)
        if not holder.of("ended"):
            return holder
        holder.end()
        holder.check_recording()
    raise AssertionError("the arm was stopped five times before anything was done to its link")


def moved_over(rig: LinkedRig, folder: Path, share: float) -> ArmState | None:
    """Move the arm sixty times while packets are lost; return its state, or None where its holder was held up."""
    holder = begun(rig, folder, 0, 3)
    try:
        before = len(holder.of("moved"))
        rig.link.set(lost=share)
        until(lambda: len(holder.of("moved")) >= before + 60 or holder.of("ended"), "sixty moves", TOLD)
        with FrankaClient(rig.arm) as watcher:
            state = watcher.state()
        if any("sent nothing" in str(words) for words in holder.of("ended")):
            return None
        assert not holder.of("ended")
        return state
    finally:
        rig.link.set()
        holder.end()
        holder.check_recording()


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_lost_packets_do_not_stop_the_arm(rig: LinkedRig, tmp_path: Path, share: float) -> None:
    attempts = (moved_over(rig, tmp_path / str(attempt), share) for attempt in range(5))
    state = next((state for state in attempts if state is not None), None)
    assert state is not None, "the holder was held up five times"
    log_figures(lost=share, success_rate=state.success_rate, mode=state.mode)
    assert (state.mode, state.stopped) == ("move", None)
    assert 0.5 < state.success_rate < 1


@pytest.mark.parametrize(
    ("fault", "cause"),
    [({"delay": 0.003}, "communication_constraints_violation"), ({"lost": 1.0}, "UDP receive: Timeout")],
    ids=["delayed", "cut"],
)
@pytest.mark.parametrize("seed", range(MOMENTS))
def test_arm_stands_when_no_command_is_in_time(
    rig: LinkedRig, tmp_path: Path, seed: int, fault: dict[str, float], cause: str
) -> None:
    holder = begun(rig, tmp_path, seed, int(np.random.default_rng(seed).integers(2, 30)))
    try:
        before = rig.server.report()
        rig.link.set(**fault)
        after = rig.server.report()
        rig.server.run(1.0)
        report = rig.server.report()
        figures = {"decided": report["command"] - after["now"], "braked": report["still"] - report["command"]}
        log_figures(seed=seed, **fault, speed=before["speed"], **figures)
        assert report["speed"] < STILL, report
        assert report["still"] - after["now"] <= LOST_CYCLES + BRAKES, (before, after, report)
        until(lambda: holder.of("ended"), "what the holder is told", TOLD)
        check_named(holder.of("ended")[0], rig.arm, cause)
    finally:
        rig.link.set()
        holder.end()
    holder.check_recording()
    with FrankaClient(rig.arm) as client:
        client.acquire(20)
        assert client.reset(HOME).stopped is None
        assert client.move(np.zeros(7)).mode == "move"
