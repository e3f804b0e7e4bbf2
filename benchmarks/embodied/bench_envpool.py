"""EnvPool's Meta-World through our adapter beside the bare Meta-World package: environment steps per CPU second.

    RLINF_ENVPOOL_PYTHON=/opt/venv/envpool/bin/python python benchmarks/embodied/bench_envpool.py

The interpreter that the variable names needs both packages: `pip install 'envpool>=1.2.5,<2' metaworld`. 16
environments of a task take turns, with the same actions, in one thread. The bare package is stepped in a loop, without
checks. The goal is 1.8 of it; exits with 1 when a task misses that.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# EnvPool's name of a task, and Meta-World's.
TASKS = {"MetaWorld/Reach-v3": "reach-v3", "MetaWorld/Push-v3": "push-v3", "MetaWorld/PickPlace-v3": "pick-place-v3"}
NUM_ENVS, ROUNDS, CPU_SECONDS, GOAL = 16, 7, 0.5, 1.8


def measure() -> int:
    """Print the figures of each task, in the interpreter of both packages."""
    import gymnasium
    import metaworld  # noqa: F401 - registers its ids
    import numpy as np

    from recipes.embodied.envs.env_spec import EnvSettings
    from recipes.embodied.envs.registry import make_env

    kept = True
    actions = np.random.default_rng(0).uniform(-1, 1, (101, NUM_ENVS, 1, 4)).astype(np.float32)
    for task, name in TASKS.items():
        options = {"partially_observable": False}
        env = make_env("envpool", EnvSettings(num_envs=NUM_ENVS, task=task, options=options))
        bare = [gymnasium.make("Meta-World/MT1", env_name=name, seed=number) for number in range(NUM_ENVS)]

        def bare_step(batch: Any, bare: Any = bare) -> None:
            for one, action in zip(bare, batch[:, 0], strict=True):
                one.unwrapped.step(action)

        rates: dict[str, list[float]] = {"bare": [], "envpool": []}
        ways: dict[str, Callable[[Any], Any]] = {"bare": bare_step, "envpool": env.step}
        for _ in range(ROUNDS):
            env.reset(0)
            for one in bare:
                one.reset()
            for way, step in ways.items():
                steps, begun, now = 0, time.process_time(), 0.0
                while now < CPU_SECONDS and steps < 450 * NUM_ENVS:  # an episode of the bare package has 500 steps
                    step(actions[steps // NUM_ENVS % len(actions)])
                    steps, now = steps + NUM_ENVS, time.process_time() - begun
                rates[way].append(steps / now)
        env.close()
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["envpool"], rates["bare"], strict=True))
        kept &= ratio >= GOAL
        medians = [statistics.median(speeds) for speeds in rates.values()]
        print(f"{task:<24} {medians[0]:10,.0f} {medians[1]:10,.0f} {ratio:6.2f}", flush=True)
    return 0 if kept else 1


def main() -> int:
    if sys.argv[1:] == ["--inside"]:
        return measure()
    python = os.environ.get("RLINF_ENVPOOL_PYTHON")
    if not python:
        print("RLINF_ENVPOOL_PYTHON names no interpreter")
        return 0
    print(f"{'task':<24} {'bare':>10} {'envpool':>10} {'ratio':>6}  (steps/cpu-s)", flush=True)
    return subprocess.run([python, __file__, "--inside"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
