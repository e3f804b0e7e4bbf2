"""Steps per CPU second of each simulator through our adapter, in this process and in another, beside the bare one.

    RLINF_METAWORLD_PYTHON=/opt/venv/metaworld/bin/python python -m benchmarks.embodied.bench_simulators [ENV_TYPE ...]

`RLINF_LIBERO_PYTHON`, `RLINF_METAWORLD_PYTHON`, `RLINF_ROBOSUITE_PYTHON` and `RLINF_GYMNASIUM_ROBOTICS_PYTHON` name the
interpreters, which `rlinf venv setup` makes; simulators without one are left out. They take turns on the same
copies of the task, with the same actions and without images; CPU seconds are those of both processes. A chunk is what a
policy answers an observation with. `--few` leaves out all but four environments and one action at a time. The
goal is 0.9 of the bare simulator.

The bare simulator also takes a turn with a pause before each chunk, as long as the worker computes between two
messages to its process: what the processor's caches lose meanwhile, no message can win back.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TASKS = {
    "metaworld": "reach-v3",
    "gymnasium_robotics": "FetchReachDense-v4",
    "robosuite": "Lift",
    "libero": "libero_spatial/0",
}
# Environments of a batch, and actions of a chunk: few, and about what the shipped configurations of Meta-World have.
SIZES = ((4, 1), (16, 1), (16, 5))
ROUNDS, CPU_SECONDS, GOAL = 12, 0.5, 0.9


def cpu_seconds(pids: list[int]) -> float:
    """Return CPU seconds of this process and of some others."""
    # The number of a process's own clock, as Linux makes it of the process's number.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def own_seconds(step: Callable[[], Any], calls: int = 200) -> float:
    """Return CPU seconds of this process for a call."""
    begun = time.process_time()
    for _ in range(calls):
        step()
    return (time.process_time() - begun) / calls


def bare_step(simulation: Any) -> Callable[[Any], Any]:
    """Return the simulator's own method that takes a step."""
    plain = getattr(simulation, "_plain", None)
    return plain.env.unwrapped.step if plain is not None else simulation._env.step


def measure(env_type: str, num_envs: int, chunk: int) -> None:
    """Print the figures of one simulator, in whose interpreter this is."""
    import numpy as np

    from recipes.embodied.envs.env_spec import EnvSettings
    from recipes.embodied.envs.registry import make_env

    def made(processes: int) -> Any:
        return make_env(
            env_type,
            EnvSettings(
                num_envs=num_envs,
                task=TASKS[env_type],
                max_episode_steps=10**6,
                ignore_terminations=True,
                options={"cameras": []},
                num_processes=processes,
            ),
        )

    here, apart = made(0), made(1)
    pids = [child._process.pid for child in apart._simulators._children]
    steps = [bare_step(simulation) for simulation in here._simulators.simulations]
    actions = np.random.default_rng(0).uniform(-1, 1, (num_envs, chunk, here.spec.action_size)).astype(np.float32)

    def bare() -> None:
        for index in range(chunk):
            for step, action in zip(steps, here._simulators.simulations[0].native(actions[:, index]), strict=True):
                step(action)

    def paused() -> None:
        time.sleep(pause)
        bare()

    ways: dict[str, Callable[[], Any]] = {
        "bare": bare,
        "with pauses": paused,
        "in the worker": lambda: here.step(actions),
        "in its process": lambda: apart.step(actions),
    }
    here.reset()
    apart.reset()
    pause = own_seconds(lambda: apart.step(actions))
    for step in ways.values():
        step()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, step in ways.items():
            # From the same starts, so that none has more contacts than another.
            here.reset(0)
            apart.reset(0)
            count, begun, now = 0, cpu_seconds(pids), 0.0
            while now < CPU_SECONDS:
                step()
                count, now = count + num_envs * chunk, cpu_seconds(pids) - begun
            rates[name].append(count / now)
    apart.close()
    here.close()
    # The median of the rounds' ratios: what else the machine does disturbs some rounds, and all ways of a round alike.
    ratios = {
        name: statistics.median(speed / bare for speed, bare in zip(speeds, rates["bare"], strict=True))
        for name, speeds in rates.items()
    }
    line = f"{env_type:<20} {TASKS[env_type]:<20} {num_envs:4} {chunk:5} {statistics.median(rates['bare']):9,.0f}"
    for name in ("with pauses", "in the worker", "in its process"):
        line += f" {statistics.median(rates[name]):10,.0f} {ratios[name]:5.2f}"
    print(line, flush=True)
    sys.exit(0 if min(ratios["in the worker"], ratios["in its process"]) >= GOAL else 1)


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    heads = f"{'bare':>9} {'with pauses':>16} {'in the worker':>16} {'in its process':>16}  (steps/cpu-s)"
    print(f"{'env_type':<20} {'task':<20} envs chunk {heads}")
    missed = 0
    named = [word for word in sys.argv[1:] if word != "--few"]
    for env_type in named or TASKS:
        python = os.environ.get(f"RLINF_{env_type.upper()}_PYTHON")
        if not python:
            print(f"{env_type:<20} {TASKS[env_type]:<20} no interpreter is named")
            continue
        for size in SIZES[:1] if "--few" in sys.argv else SIZES:
            command = [python, __file__, "--inside", env_type, *map(str, size)]
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            lines = [line for line in ended.stdout.splitlines() if line.startswith(env_type)]
            print(*lines or [f"{env_type}: failed"], sep="\n", flush=True)
            missed += ended.returncode != 0
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
