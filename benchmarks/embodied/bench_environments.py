"""Steps per CPU second of every environment that is installed, 64 at once in one process, without a policy.

    python benchmarks/embodied/bench_environments.py

Prints one line for each task: steps per CPU second (the best of three), and how many times the steps of CartPole-v1 by
Gymnasium that is. Those of Gymnasium take turns with a bare loop over as many environments, which step with random
actions and reset where an episode ends: `of bare` is the best of the adapter over the best of the loop. The promise of
the recipe's default, `franka_kin`, is 100,000 steps, that of CartPole 0.7 of the loop; exits with 1 when one is not
kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.contract import random_actions
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import MissingPackageError, make_env

TASKS = (
    ("gymnasium", "CartPole-v1"),
    ("gymnasium", "Pendulum-v1"),
    ("franka_kin", "pick"),
    ("franka_kin", "reach"),
    ("franka_mujoco", "reach"),
    ("franka_mujoco", "push"),
    ("panda_gym", "PandaReach-v3"),
)
NUM_ENVS, ROUNDS, CPU_SECONDS = 64, 3, 0.5
# Rounds beside a bare loop, of shorter turns: what else the machine does then disturbs both alike.
BARE_ROUNDS, BARE_CPU_SECONDS = 25, 0.1
GOAL_KIND, GOAL, BARE_GOAL = "franka_kin", 100_000, 0.7
# Batches of random actions, in turn.
BATCHES = 101


def steps_per_second(step: Callable[[], Any], seconds: float = CPU_SECONDS) -> float:
    steps, begun, now = 0, time.process_time(), 0.0
    while now < seconds:
        step()
        steps, now = steps + NUM_ENVS, time.process_time() - begun
    return steps / now


def adapter_step(env: VectorEnv) -> Callable[[], Any]:
    """Return a function that carries out one random action in every environment."""
    env.reset()
    actions = cycle([random_actions(env.spec, NUM_ENVS, seed=seed) for seed in range(BATCHES)])
    return lambda: env.step(next(actions))


def bare_step(task: str) -> Callable[[], None]:
    """Return the same of environments as `gymnasium.make` makes them."""
    import gymnasium

    envs = [gymnasium.make(task) for _ in range(NUM_ENVS)]
    for number, env in enumerate(envs):
        env.reset(seed=number)
    actions = cycle([[env.action_space.sample() for env in envs] for _ in range(BATCHES)])

    def step() -> None:
        for env, action in zip(envs, next(actions), strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return step


def main() -> int:
    print(f"{'env_type':<14} {'task':<14} {'steps/cpu-s':>12} {'of CartPole':>12} {'of bare':>8}")
    unit, kept = 0.0, True
    for kind, task in TASKS:
        try:
            env = make_env(kind, EnvSettings(num_envs=NUM_ENVS, task=task))
        except MissingPackageError as error:
            print(f"{kind:<14} {task:<14} {'-':>12} {'-':>12}  {error.package} is not installed")
            continue
        step, shown = adapter_step(env), ""
        if kind == "gymnasium":
            bare = bare_step(task)
            rounds = [[steps_per_second(way, BARE_CPU_SECONDS) for way in (bare, step)] for _ in range(BARE_ROUNDS)]
            fastest, speed = (max(speeds) for speeds in zip(*rounds, strict=True))
            shown = f" {speed / fastest:8.2f}"
            kept &= task != "CartPole-v1" or speed / fastest >= BARE_GOAL
        else:
            speed = max(steps_per_second(step) for _ in range(ROUNDS))
        env.close()
        unit = unit or speed
        kept &= kind != GOAL_KIND or speed >= GOAL
        print(f"{kind:<14} {task:<14} {speed:12,.0f} {speed / unit:12.2f}{shown}", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
