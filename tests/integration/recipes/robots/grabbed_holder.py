"""The holder of an arm that moves it by chunks of actions, a person who grabs it within a chunk, and a fault then.

python -m tests.integration.recipes.robots.grabbed_holder IP PORT FOLDER SEED FAULT
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.interventions.intervention import InterventionError, InterventionSource, Steerable, Takeover
from recipes.embodied.off_policy.segments import SegmentWriter
from rlinf_core.errors import RLinfError
from rlinf_core.hardware.franka import Franka

CHUNK: Final = 8
SIGNALS: Final = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
PERSONS_ACTION: Final = 0.25


def grabbed(seed: int) -> tuple[NDArray[np.bool_], int]:
    """Return in which of the ticks a person moves the arm, bool [T], and the tick of the fault.

    They begin within a chunk, not with it, and the fault comes while they move the arm.
    """
    random = np.random.default_rng(seed)
    ticks = np.zeros(5 * CHUNK, np.bool_)
    for chunk in range(5):
        begin, end = np.sort(random.choice(np.arange(1, CHUNK + 1), 2, replace=False))
        ticks[CHUNK * chunk + begin : CHUNK * chunk + end] = True
    return ticks, int(random.choice(np.flatnonzero(ticks[3 * CHUNK :]))) + 3 * CHUNK


class Grabbing(InterventionSource):
    """A person who moves the arm in the ticks of `grabbed`, until the fault."""

    def __init__(self, env: Steerable, options: tuple[int, str]) -> None:
        super().__init__(env, options)
        self._tick = -1
        (self._ticks, self._last), self._fault = grabbed(options[0]), options[1]

    def read(self) -> Takeover | None:
        """See `InterventionSource`."""
        self._tick += 1
        action = np.full((1, self.env.action_size), PERSONS_ACTION, np.float32)
        if self._tick == self._last:
            if self._fault in SIGNALS:
                os.kill(os.getpid(), SIGNALS[self._fault])
            elif self._fault == "unplugged":
                raise InterventionError("the device was lost", where="/dev/person", help="plug it in again")
            action[:] = np.nan
        return Takeover(np.array([True]), action, {}) if self._ticks[self._tick] else None


def main(ip: str, port: str, folder: str, seed: str, fault: str) -> None:
    arm = Franka(node_rank=3, robot_ip=ip, robot_port=int(port))
    env: Any = make_env("franka_robot", EnvSettings(num_envs=1, hardware=(arm,), max_episode_steps=1000))
    env.intervention = Grabbing(env, (int(seed), fault))
    random = np.random.default_rng(int(seed))
    env.reset()
    try:
        recorder = SegmentWriter(Path(folder))
        while True:
            chunk = random.uniform(-1, 1, (1, CHUNK, env.action_size)).astype(np.float32)
            done = env.step(chunk)
            output = {"policy": chunk[0], "executed": done.executed[0], "flags": done.interventions[0]}
            recorder.append(output)
            print("recorded", flush=True)
    except RLinfError as error:
        print(error, error.help, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
