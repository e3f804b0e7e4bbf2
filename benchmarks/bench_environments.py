"""Steps per CPU second of every environment that is installed, 64 at once in one process, without a policy.

    python benchmarks/bench_environments.py

Prints one line for each task: steps per CPU second (the best of three), and how many times the steps of CartPole-v1 by
Gymnasium that is. The promise of the recipe's default, `franka_kin`, is 100,000; exits with 1 when it is not kept.
"""

from __future__ import annotations

import sys
import time

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.contract import random_actions
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import MissingPackageError, make_env

TASKS = (
    ("gymnasium", "CartPole-v1"),
    ("franka_kin", "pick"),
    ("franka_kin", "reach"),
    ("franka_mujoco", "reach"),
    ("franka_mujoco", "push"),
    ("panda_gym", "PandaReach-v3"),
)
NUM_ENVS, ROUNDS, CPU_SECONDS = 64, 3, 0.5
GOAL_KIND, GOAL = "franka_kin", 100_000


def steps_per_second(env: VectorEnv) -> float:
    """Return the best of a few rounds, so that what else the machine does matters little."""
    env.reset()
    actions = random_actions(env.spec, NUM_ENVS)
    best = 0.0
    for _ in range(ROUNDS):
        steps, begun, now = 0, time.process_time(), 0.0
        while now < CPU_SECONDS:
            env.step(actions)
            steps, now = steps + NUM_ENVS, time.process_time() - begun
        best = max(best, steps / now)
    return best


def main() -> int:
    print(f"{'env_type':<14} {'task':<14} {'steps/cpu-s':>12} {'of CartPole':>12}")
    unit, kept = 0.0, True
    for kind, task in TASKS:
        try:
            env = make_env(kind, EnvSettings(num_envs=NUM_ENVS, task=task))
        except MissingPackageError as error:
            print(f"{kind:<14} {task:<14} {'-':>12} {'-':>12}  {error.package} is not installed")
            continue
        speed = steps_per_second(env)
        env.close()
        unit = unit or speed
        kept &= kind != GOAL_KIND or speed >= GOAL
        print(f"{kind:<14} {task:<14} {speed:12,.0f} {speed / unit:12.2f}", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
