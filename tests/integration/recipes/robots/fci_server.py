"""A public server of Franka's control interface over MuJoCo, with its limits in force, that reports in simulated time.

    python fci_server.py ADDRESS

Runs in an interpreter of its own with `franka-sim`. A line on stdin is answered by a line of JSON: `now`, the moment of
the `command` that came last, and that since which the arm is `still`, in simulated seconds; its `speed` and `errors`.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from franka_sim import FrankaSimServer
from franka_sim.comm_constraints import CommConstraintTracker

STILL = 5e-3  # radians per second


class Record:
    """What happened last, in simulated seconds."""

    def __init__(self) -> None:
        self.now = self.command = self.moved = 0.0
        self.speed = 0.0


def main() -> None:
    record = Record()
    server: Any = FrankaSimServer(
        host=sys.argv[1], protocol_version=10, enforce_comm_constraints=True, enforce_motion_limits=True
    )
    physics = server.physics_sim
    publish, heard = physics._read_and_publish_state, CommConstraintTracker.command_received

    def watched() -> None:
        publish()
        record.now = float(physics.data.time)
        record.speed = float(abs(physics.get_robot_state()["dq"]).max())
        if record.speed > STILL:
            record.moved = record.now

    def counted(self: CommConstraintTracker, number: int) -> bool:
        record.command = record.now
        return heard(self, number)

    physics._read_and_publish_state, CommConstraintTracker.command_received = watched, counted
    threading.Thread(target=server.start, daemon=True).start()
    for _ in sys.stdin:
        errors = [index for index, error in enumerate(server.robot_state.state["errors"]) if error]
        report = {"now": record.now, "command": record.command, "still": record.moved, "speed": record.speed}
        print(json.dumps({**report, "errors": errors}), flush=True)


main()
