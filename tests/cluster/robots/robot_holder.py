"""The holder of an arm on another machine: it moves the arm, records each motion, and tells what goes wrong.

python -m tests.cluster.robots.robot_holder IP PORT FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy as np

from recipes.embodied.off_policy.segments import SegmentWriter
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP, HOME
from recipes.embodied.robots.robot_errors import RobotError, RobotLateError, RobotSilentError
from rlinf_core.hardware.franka import Franka

# Within which a call must have its answer, so that a link that is cut is told soon.
CALL_SECONDS: Final = 3.0


def tell(word: str, *values: object) -> None:
    print(word, *values, flush=True)


def tell_error(word: str, error: RobotError) -> None:
    tell(word, repr(str(error)), repr(error.why), repr(error.help))


def move_on(client: FrankaClient, folder: Path) -> None:
    """Move by random actions until the arm cannot be moved; a motion is told once it is recorded."""
    random = np.random.default_rng(0)
    recorder = SegmentWriter(folder)
    while True:
        try:
            state = client.move(random.uniform(-1, 1, 7) * ACTION_STEP[:, 0])
        except RobotLateError as error:
            tell_error("late", error)
            client.state()
            continue
        except RobotSilentError:  # this process was held up, by a busy machine
            client.reset(HOME)
            continue
        recorder.append({"joints": state.joints})
        tell("moved", state.joints.tobytes().hex())


def main(ip: str, port: str, folder: str) -> None:
    try:
        client = FrankaClient(Franka(node_rank=4, robot_ip=ip, robot_port=int(port)), seconds=CALL_SECONDS)
        client.acquire()
        client.reset(HOME)
        move_on(client, Path(folder))
    except RobotError as error:
        tell_error("ended", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
