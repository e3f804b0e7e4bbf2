"""The holder of an arm, as a client of its controller or as the environment of a worker, that records every motion.

    python -m tests.integration.recipes.robots.fci.fci_holder PORT FOLDER SEED client|env

Prints `holds`, `moved` with the recorded numbers, and `ended` with the error that ended it, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.off_policy.segments import SegmentWriter
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import ACTION_STEP, HOME
from recipes.embodied.robots.robot_errors import RobotError, RobotLateError
from rlinf_core.hardware.franka import Franka

CHUNK: Final = 4
# Within which a call must have its answer, so that a frozen controller is told soon.
CALL_SECONDS: Final = 4.0


def tell(word: str, value: object = None) -> None:
    print(word, json.dumps(value), flush=True)


def actions(seed: int) -> Iterator[NDArray[np.float32]]:
    """Return actions [7] that bring the arm to all speeds: each is kept up for some periods, then another follows."""
    random = np.random.default_rng(seed)
    while True:
        action = random.uniform(-0.8, 0.8, 7).astype(np.float32)
        for _ in range(int(random.integers(2, 14))):
            yield action


def act_as_client(arm: Franka, recorder: SegmentWriter, seed: int) -> None:
    client = FrankaClient(arm, seconds=CALL_SECONDS)
    client.acquire()
    tell("holds")
    client.reset(HOME)
    for action in actions(seed):
        try:
            state = client.move(action * ACTION_STEP[:, 0])
        except RobotLateError:  # on a busy machine
            client.state()
            continue
        recorder.append({"numbers": state.target})
        tell("moved", state.target.tolist())


def act_as_env(arm: Franka, recorder: SegmentWriter, seed: int) -> None:
    env: Any = make_env("franka_robot", EnvSettings(num_envs=1, hardware=(arm,), max_episode_steps=10_000, seed=seed))
    tell("holds")
    env.reset()
    stream = actions(seed)
    while True:
        done = env.step(np.stack([next(stream) for _ in range(CHUNK)])[None])
        recorder.append({"numbers": done.executed[0]})
        tell("moved", done.executed[0].tolist())


def main(port: str, folder: str, seed: str, kind: str) -> None:
    arm = Franka(node_rank=3, robot_ip="127.0.0.1", robot_port=int(port), disable_validate=True)
    try:
        recorder = SegmentWriter(Path(folder))
        (act_as_env if kind == "env" else act_as_client)(arm, recorder, int(seed))
    except RobotError as error:
        tell("ended", [str(error), error.where, error.why, error.help])


if __name__ == "__main__":
    main(*sys.argv[1:])
