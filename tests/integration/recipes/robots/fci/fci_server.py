"""A public server of Franka's control interface over MuJoCo, with its limits in force, that reports in simulated time.

    python fci_server.py ADDRESS [patient]

Runs in an interpreter of its own with `franka-sim`. A line on stdin is answered by a line of JSON: `now`, the moment of
the `command` that came last, and that since which the arm is `still`, in simulated seconds; its `speed`, `joints` and
`errors`, and the `fastest` speed since the line before. A line with the name of an error ends a motion by that reflex.
A `patient` server neither counts lost cycles nor limits what they make of a motion: on a busy machine its own threads
lose some, and a long run would end.

Speeds are those of 20 cycles: a light joint may tremble about its place in every one, by a ten thousandth of a radian.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from typing import Any

import numpy as np
from franka_sim import FrankaSimServer
from franka_sim.comm_constraints import CommConstraintTracker

STILL = 0.02  # radians per second
WINDOW = 20  # cycles
# Numbers of reflexes that the server's own scene cannot cause, as the interface counts them: it has no objects.
REFLEXES = {"cartesian_reflex": 7, "joint_reflex": 6}


class Record:
    """What happened last, in simulated seconds."""

    def __init__(self) -> None:
        self.now = self.command = self.moved = 0.0
        self.speed = self.fastest = 0.0
        self.places: deque[Any] = deque(maxlen=WINDOW + 1)


def main() -> None:
    record = Record()
    strict = "patient" not in sys.argv[2:]
    server: Any = FrankaSimServer(
        host=sys.argv[1],
        protocol_version=10,
        enforce_comm_constraints=strict,
        enforce_motion_limits=strict,
    )
    physics = server.physics_sim
    publish, heard = physics._read_and_publish_state, CommConstraintTracker.command_received

    def watched() -> None:
        publish()
        now, joints = float(physics.data.time), np.array(physics.get_robot_state()["q"][:7], float)
        if now == record.now:
            return
        record.now = now
        record.places.append(joints)
        record.speed = float(abs(joints - record.places[0]).max()) / (WINDOW * physics.dt)
        record.fastest = max(record.fastest, record.speed)
        if record.speed > STILL:
            record.moved = record.now

    def counted(self: CommConstraintTracker, number: int) -> bool:
        record.command = record.now
        return heard(self, number)

    physics._read_and_publish_state, CommConstraintTracker.command_received = watched, counted
    threading.Thread(target=server.start, daemon=True).start()
    for line in sys.stdin:
        if line.strip():
            server._abort_with_error(REFLEXES[line.strip()], "the test asked for it")
        errors = [index for index, error in enumerate(server.robot_state.state["errors"]) if error]
        report: dict[str, Any] = {"now": record.now, "command": record.command, "still": record.moved}
        report |= {"speed": record.speed, "fastest": record.fastest, "errors": errors}
        report["joints"] = record.places[-1].tolist() if record.places else []
        print(json.dumps(report), flush=True)
        record.fastest = record.speed


main()
