"""Links to a server of Franka's control interface, and its moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP, CONTROL_SECONDS, HOME
from recipes.embodied.robots.robot_errors import RobotError
from recipes.embodied.robots.wire_protocol import ArmState
from rlinf_core.hardware.franka import Franka
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
    own_address,
)
from tests.waiting import until

pytestmark = [*NEEDS_FCI]

MOMENTS: Final = int(os.environ.get("RLINF_TEST_MOMENTS", "6"))


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


@pytest.mark.netns
@pytest.mark.timeout(120 + 60 * MOMENTS)
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_lost_packets_do_not_stop_the_arm(rig: LinkedRig, tmp_path: Path, share: float) -> None:
    attempts = (moved_over(rig, tmp_path / str(attempt), share) for attempt in range(5))
    state = next((state for state in attempts if state is not None), None)
    assert state is not None, "the holder was held up five times"
    log_figures(lost=share, success_rate=state.success_rate, mode=state.mode)
    assert (state.mode, state.stopped) == ("move", None)
    assert 0.5 < state.success_rate < 1


@pytest.mark.netns
@pytest.mark.timeout(120 + 60 * MOMENTS)
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


RISKY_MOMENTS: Final = int(os.environ.get("RLINF_TEST_MOMENTS", "16"))
FIRST: Final = int(os.environ.get("RLINF_TEST_FIRST", "0"))

# A kind of fault for each remainder of a seed: who is hit, and by what.
FAULTS: Final = (
    ("client", signal.SIGKILL),
    ("client", signal.SIGSTOP),
    ("env", signal.SIGKILL),
    ("env", signal.SIGSTOP),
    ("controller", signal.SIGKILL),
    ("controller", signal.SIGSTOP),
    ("server", signal.SIGSTOP),
    ("server", signal.SIGKILL),
)
# Two periods of ours without a sign of life, and the one between two looks of the controller.
DECIDES: Final = 2 * CONTROL_SECONDS + CONTROL_SECONDS / 5


@pytest.fixture(scope="module")
def moment_rig() -> Iterator[Rig]:
    made = Rig(Server(own_address()))
    try:
        yield made
    finally:
        made.end()


def state_of(arm: Franka) -> ArmState:
    with FrankaClient(arm) as client:
        return client.state()


def refusal_of(arm: Franka) -> RobotError:
    """Return the error that the next holder gets who moves without a reset."""
    with FrankaClient(arm) as client:
        client.acquire(10)
        with pytest.raises(RobotError) as caught:
            client.move(ACTION_STEP[:, 0] * 0.1)
    return caught.value


def check_stopped_by_us(moment_rig: Rig, holder: Holder, began: float) -> dict[str, Any]:
    """Check an arm whose holder is gone: stopped by the controller, and free with the reason."""
    with FrankaClient(moment_rig.arm) as watcher:
        until(lambda: watcher.state().stopped is not None, "a stop", 20)
        until(lambda: watcher.state().holder is None, "a free arm", 20)
    moment_rig.server.run(1.0)
    report = moment_rig.server.report()
    assert report["errors"] == []
    # An arm at rest is left there until the lease ends.
    assert min(report["command"], report["still"]) - began <= DECIDES, (began, report)
    check_named(refusal_of(moment_rig.arm), moment_rig.arm, f"process {holder.process.pid}")
    return report


def check_stopped_by_itself(moment_rig: Rig, holder: Holder, number: signal.Signals) -> dict[str, Any]:
    """Check an arm whose controller is gone: 20 lost cycles and braking; the holder is told.

    A reset that was interrupted because the controller was held up goes on when it is back.
    """
    moment_rig.server.run(1.0)
    report = moment_rig.server.report()
    if number == signal.SIGKILL:
        until(lambda: holder.of("ended"), "what the holder is told", TOLD)
        check_named(holder.of("ended")[0], moment_rig.arm, "the controller closed the connection")
        return report
    moved = len(holder.of("moved"))
    if moved and holder.kind == "client":
        until(lambda: holder.of("ended"), "what the holder is told", TOLD)
    moment_rig.controller.send_signal(signal.SIGCONT)
    until(lambda: holder.of("ended") or (not moved and holder.of("moved")), "what the holder is told", TOLD)
    if holder.of("ended"):
        causes = (
            "no response within",
            "the controller was held up",
            "the controller closed",
            "the arm ended its motion",
        )
        check_named(holder.of("ended")[0], moment_rig.arm, *causes)
    return report


def check_without_server(moment_rig: Rig, holder: Holder, number: signal.Signals) -> None:
    """Check that a holder is told of an arm that has gone, and whether the next reset finds it again."""
    until(lambda: holder.of("ended"), "what the holder is told", TOLD)
    check_named(holder.of("ended")[0], moment_rig.arm, "the arm")
    if number == signal.SIGSTOP:
        moment_rig.server.process.send_signal(signal.SIGCONT)


def held(moment_rig: Rig, folder: Path, seed: int, kind: str, seconds: float) -> Holder:
    """Return a holder of the arm, so many simulated seconds after it took it.

    Another one begins where the arm was stopped meanwhile: on a busy machine lost cycles may come too early.
    """
    for attempt in range(5):
        moment_rig.mend()
        holder = Holder(moment_rig.arm, folder / f"steps-{attempt}", seed, kind, attempt)
        until(lambda holder=holder: holder.of("holds") or holder.of("ended"), "a holder", 60)
        moment_rig.server.run(seconds)
        if not holder.of("ended") and f"process {holder.process.pid} " not in str(state_of(moment_rig.arm).stopped):
            return holder
        holder.end()
        holder.check_recording()
    raise AssertionError("the arm was stopped five times before anything was done to it")


@pytest.mark.timeout(120 + 40 * RISKY_MOMENTS)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + RISKY_MOMENTS))
def test_arm_stands_after_a_fault_at_any_moment(moment_rig: Rig, seed: int, tmp_path: Path) -> None:
    victim, number = FAULTS[seed % len(FAULTS)]
    random = np.random.default_rng(seed)
    kind = victim if victim in ("client", "env") else ("client", "env")[seed // len(FAULTS) % 2]
    # Within the reset, or among the moves.
    holder = held(moment_rig, tmp_path, seed, kind, float(random.uniform(0.1, 4.0)))
    try:
        hit = {"controller": moment_rig.controller, "server": moment_rig.server.process}.get(victim, holder.process)
        before = moment_rig.server.report()
        hit.send_signal(number)
        # This process may be held up before it sends the signal: what is counted begins when it has.
        after = moment_rig.server.report() if hit is not moment_rig.server.process else before
        figures: dict[str, Any] = {"seed": seed, "victim": victim, "signal": number.name, "attempt": holder.attempt}
        if victim == "server":
            check_without_server(moment_rig, holder, number)
        else:
            if victim == "controller":
                report, allowed = check_stopped_by_itself(moment_rig, holder, number), LOST_CYCLES + BRAKES
            else:
                report, allowed = check_stopped_by_us(moment_rig, holder, after["now"]), BRAKES
            assert report["speed"] < STILL, report
            assert report["still"] - report["command"] <= allowed, (before, report)
            figures |= {"decided": report["command"] - after["now"], "braked": report["still"] - report["command"]}
        log_figures(**figures, speed=before["speed"])
    finally:
        for frozen in (moment_rig.controller, moment_rig.server.process):
            frozen.send_signal(signal.SIGCONT)
        holder.end()
    holder.check_recording()
