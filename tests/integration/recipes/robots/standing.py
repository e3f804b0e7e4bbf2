"""Jobs on simulated arms, and checks that an arm stands still, by its controller's own record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.wire_protocol import ArmState
from rlinf_core.hardware.franka import Franka
from tests.waiting import until

# Control periods of the controller within which the arm has to stand still.
ALLOWED: Final = 2


def job_of(*arms: Franka, addresses: Sequence[str] = (), extends: str = "", **sections: Any) -> str:
    """Return the text of a job with an env worker for each arm.

    Args:
        arms: the arms.
        addresses: what the file says of their addresses, where it is something else than they are.
        extends: the file that it changes.
        sections: the other sections; `node_group` is added to that of the arms.
    """
    places = addresses or [arm.robot_ip for arm in arms]
    configs = [
        {"node_rank": 0, "robot_ip": place, "robot_port": arm.robot_port}
        for place, arm in zip(places, arms, strict=True)
    ]
    hardware = {"type": "Franka", "configs": configs}
    group = {"label": "arms", "node_ranks": 0, "hardware": hardware, **sections.pop("node_group", {})}
    placed = {"actor,rollout": ("node", "0"), "env": ("arms", f"0-{len(arms) - 1}" if len(arms) > 1 else "0")}
    placement = {name: {"node_group": label, "placement": ranks} for name, (label, ranks) in placed.items()}
    cluster = {"num_nodes": 1, "component_placement": placement, "node_groups": [group]}
    head = {"extends": extends} if extends else {"recipe": "embodied"}
    return json.dumps({**head, "cluster": cluster, **sections})


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
