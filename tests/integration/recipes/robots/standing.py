"""Checks that an arm stands still, by its controller's own record."""

from __future__ import annotations

from typing import Final

from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.wire_protocol import ArmState
from rlinf_core.hardware.robots.franka import Franka
from tests.waiting import until

# Control periods of the controller within which the arm has to stand still.
ALLOWED: Final = 2


def stands(arm: Franka) -> ArmState | None:
    """Return the state of an arm that nobody holds any more and that was stopped; None: it is not so yet."""
    with FrankaClient(arm) as watcher:
        state = watcher.state()
    return state if state.stopped and state.holder is None else None


def check_rest(arm: Franka) -> str | None:
    """Wait until an arm is free, whether its holder was lost or has released it, and check that it stands; return why
    it was stopped.
    """
    with FrankaClient(arm) as watcher:
        until(lambda: watcher.state().holder is None, "a free arm", 30, pause=0.05)
        state = watcher.state()
    assert state.still_tick is not None
    assert state.still_tick - state.heard_tick <= ALLOWED
    return state.stopped


def check_stop(arm: Franka) -> str:
    """Wait until an arm is free, and check how soon after its holder's last sign of life it stood; return why."""
    until(lambda: stands(arm) is not None, "a free arm", 30, pause=0.05)
    return str(check_rest(arm))
