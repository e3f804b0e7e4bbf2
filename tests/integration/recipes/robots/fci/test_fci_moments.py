"""Faults at random moments on the route to a real arm: holder, controller or server killed or frozen; see `fci_rig.py`.

RLINF_TEST_MOMENTS=200 tries more moments than the default, RLINF_TEST_FIRST=N begins at another seed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP, CONTROL_SECONDS
from recipes.embodied.robots.replies import ArmState
from recipes.embodied.robots.robot_errors import RobotError
from rlinf_core.hardware.robots.franka import Franka
from tests.integration.recipes.robots.fci.fci_rig import (
    BRAKES,
    LOST_CYCLES,
    NEEDS_FCI,
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

MOMENTS: Final = int(os.environ.get("RLINF_TEST_MOMENTS", "16"))
FIRST: Final = int(os.environ.get("RLINF_TEST_FIRST", "0"))
pytestmark = [*NEEDS_FCI, pytest.mark.timeout(120 + 40 * MOMENTS)]

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
def rig() -> Iterator[Rig]:
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


def check_stopped_by_us(rig: Rig, holder: Holder, began: float) -> dict[str, Any]:
    """Check an arm whose holder is gone: stopped by the controller, and free with the reason."""
    with FrankaClient(rig.arm) as watcher:
        until(lambda: watcher.state().stopped is not None, "a stop", 20)
        until(lambda: watcher.state().holder is None, "a free arm", 20)
    rig.server.run(1.0)
    report = rig.server.report()
    assert report["errors"] == []
    # An arm at rest is left there until the lease ends.
    assert min(report["command"], report["still"]) - began <= DECIDES, (began, report)
    check_named(refusal_of(rig.arm), rig.arm, f"process {holder.process.pid}")
    return report


def check_stopped_by_itself(rig: Rig, holder: Holder, number: signal.Signals) -> dict[str, Any]:
    """Check an arm whose controller is gone: 20 lost cycles and braking; the holder is told.

    A reset that was interrupted because the controller was held up goes on when it is back.
    """
    rig.server.run(1.0)
    report = rig.server.report()
    if number == signal.SIGKILL:
        until(lambda: holder.of("ended"), "what the holder is told", TOLD)
        check_named(holder.of("ended")[0], rig.arm, "the controller closed the connection")
        return report
    moved = len(holder.of("moved"))
    if moved and holder.kind == "client":
        until(lambda: holder.of("ended"), "what the holder is told", TOLD)
    rig.controller.send_signal(signal.SIGCONT)
    until(lambda: holder.of("ended") or (not moved and holder.of("moved")), "what the holder is told", TOLD)
    if holder.of("ended"):
        causes = (
            "no response within",
            "the controller was held up",
            "the controller closed",
            "the arm ended its motion",
        )
        check_named(holder.of("ended")[0], rig.arm, *causes)
    return report


def check_without_server(rig: Rig, holder: Holder, number: signal.Signals) -> None:
    """Check that a holder is told of an arm that has gone, and whether the next reset finds it again."""
    until(lambda: holder.of("ended"), "what the holder is told", TOLD)
    check_named(holder.of("ended")[0], rig.arm, "the arm")
    if number == signal.SIGSTOP:
        rig.server.process.send_signal(signal.SIGCONT)


def held(rig: Rig, folder: Path, seed: int, kind: str, seconds: float) -> Holder:
    """Return a holder of the arm, so many simulated seconds after it took it.

    Another one begins where the arm was stopped meanwhile: on a busy machine lost cycles may come too early.
    """
    for attempt in range(5):
        rig.mend()
        holder = Holder(rig.arm, folder / f"steps-{attempt}", seed, kind, attempt)
        until(lambda holder=holder: holder.of("holds") or holder.of("ended"), "a holder", 60)
        rig.server.run(seconds)
        if not holder.of("ended") and f"process {holder.process.pid} " not in str(state_of(rig.arm).stopped):
            return holder
        holder.end()
        holder.check_recording()
    raise AssertionError("the arm was stopped five times before anything was done to it")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + MOMENTS))
def test_arm_stands_after_a_fault_at_any_moment(rig: Rig, seed: int, tmp_path: Path) -> None:
    victim, number = FAULTS[seed % len(FAULTS)]
    random = np.random.default_rng(seed)
    kind = victim if victim in ("client", "env") else ("client", "env")[seed // len(FAULTS) % 2]
    # Within the reset, or among the moves.
    holder = held(rig, tmp_path, seed, kind, float(random.uniform(0.1, 4.0)))
    try:
        hit = {"controller": rig.controller, "server": rig.server.process}.get(victim, holder.process)
        before = rig.server.report()
        hit.send_signal(number)
        # This process may be held up before it sends the signal: what is counted begins when it has.
        after = rig.server.report() if hit is not rig.server.process else before
        figures: dict[str, Any] = {"seed": seed, "victim": victim, "signal": number.name, "attempt": holder.attempt}
        if victim == "server":
            check_without_server(rig, holder, number)
        else:
            if victim == "controller":
                report, allowed = check_stopped_by_itself(rig, holder, number), LOST_CYCLES + BRAKES
            else:
                report, allowed = check_stopped_by_us(rig, holder, after["now"]), BRAKES
            assert report["speed"] < STILL, report
            assert report["still"] - report["command"] <= allowed, (before, report)
            figures |= {"decided": report["command"] - after["now"], "braked": report["still"] - report["command"]}
        log_figures(**figures, speed=before["speed"])
    finally:
        for frozen in (rig.controller, rig.server.process):
            frozen.send_signal(signal.SIGCONT)
        holder.end()
    holder.check_recording()
