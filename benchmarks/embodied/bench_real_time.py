"""The cost of 100 ms of inference on a task of Meta-World, with and without real-time chunking.

    PYTHONPATH=.:VENV/lib/python3.11/site-packages python benchmarks/embodied/bench_real_time.py [--quick]

VENV is one of `rlinf venv setup metaworld`. A `flow_policy` on states learns from demonstrations of Meta-World's
expert, and then acts greedily from starts that it has not seen, on one thread and in this process. Of 80 steps a second
8 are 100 ms. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.table import Result, run_parts
from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.env_config import InferenceConfig
from recipes.embodied.envs.processes.simulator import Start
from recipes.embodied.envs.simulators.metaworld import MetaworldSimulation
from recipes.embodied.envs.simulators.options import MetaworldOptions
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.delayed_inference import DelayedInference

TASK: Final = "button-press-topdown-v3"
STEPS: Final = 150
EXECUTED, HORIZON, DELAY, HZ = 8, 24, 8, 80
DEMONSTRATIONS, BATCH, RATE = 50, 256, 1e-3
Episode = tuple[NDArray[np.float32], NDArray[np.float32]]


def simulator(goal_seed: int) -> MetaworldSimulation:
    """Return the task with 50 places of the button."""
    return MetaworldSimulation(TASK, MetaworldOptions(goal_seed=goal_seed, cameras=[]))


def demonstrations() -> list[Episode]:
    """Return states and actions of the expert's episodes."""
    simulation, episodes = simulator(0), list[Episode]()
    for number in range(DEMONSTRATIONS):
        simulation.reset(Start(seed=number, number=number))
        states, actions = list[Any](), list[Any]()
        for _ in range(STEPS):
            states.append(simulation.observe()["states"])
            actions.append(np.asarray(simulation.expert(), np.float32))
            if simulation.step(actions[-1]).terminated:
                break
        episodes.append((np.array(states), np.array(actions)))
    return episodes


def trained(episodes: list[Episode], updates: int, seed: int) -> Any:
    """Return a policy that has learned chunks of the demonstrations; beyond their end the last action is repeated."""
    torch.manual_seed(seed)
    simulation = simulator(0)
    options = {"action_horizon": HORIZON, "steps": 5}
    model = {"model_type": "flow_policy", "num_action_chunks": EXECUTED, "add_value_head": False, "options": options}
    policy: Any = make_model(EmbodiedModelConfig.model_validate(model), simulation.spec)
    states, actions = (np.concatenate([episode[part] for episode in episodes]) for part in (0, 1))
    policy.normalization = Normalization("mean_std", Statistics.of(states), Statistics.of(actions))
    lengths = [len(episode[0]) for episode in episodes]
    last = np.repeat(np.cumsum(lengths) - 1, lengths)
    optimizer = torch.optim.Adam(policy.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, updates)
    random, counted = np.random.default_rng(1), torch.ones(BATCH, HORIZON, dtype=torch.bool)
    for _ in range(updates):
        rows = random.integers(len(states), size=BATCH)
        following = np.minimum(rows[:, None] + np.arange(HORIZON), last[rows][:, None])
        inputs = policy.prepare({"states": states[rows]})
        optimizer.zero_grad()
        policy.imitation_loss(inputs, policy.from_env(actions[following]), counted).backward()
        optimizer.step()
        schedule.step()
    return policy.eval()


def solved(policy: Any, episodes: int, chunking: str, delay: int) -> float:
    """Return the share of episodes that are solved, in percent."""
    simulation, wins = simulator(1), 0
    for number in range(episodes):
        simulation.reset(Start(seed=1000 + number, number=number))
        config = InferenceConfig.model_validate({"chunking": chunking, "delay": delay})
        acting = DelayedInference(policy, config, policy.shape[0])
        step, done = 0, False
        while step < STEPS and not done:
            for action in acting.act(policy.prepare({"states": simulation.observe()["states"][None]}))[0]:
                done = simulation.step(np.clip(action, -1, 1)).terminated
                step += 1
                if done or step == STEPS:
                    break
        wins += done
    return 100 * wins / episodes


def compare(updates: int, episodes: int, seed: int) -> list[Result]:
    """Return the lines of one policy."""
    policy = trained(demonstrations(), updates, seed)
    at_once = solved(policy, episodes, "wait", 0)
    lines = list[Result]()
    for chunking, goal, met in (
        ("real_time", "< 2", lambda cost: cost < 2),
        ("switch", "> 10", lambda cost: cost > 10),
    ):
        with_delay = solved(policy, episodes, chunking, DELAY)
        cost = at_once - with_delay
        measured = f"{with_delay:.1f} % of {episodes} solved, {at_once:.1f} % without delay"
        what = f"points that {1000 * DELAY // HZ} ms cost, {chunking}, seed {seed}"
        lines.append(Result(what, measured, f"{cost:.1f}", goal, bool(met(cost))))
    return lines


def main() -> int:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description="the cost of a delay with and without real-time chunking")
    parser.add_argument("--quick", action="store_true", help="one seed and fewer episodes")
    quick = parser.parse_args().quick
    if find_spec("metaworld") is None:
        print("Meta-World is not installed: nothing is measured", file=sys.stderr)
        return 0
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], list[Result]]] = {
        f"seed {seed}": lambda seed=seed: compare(3000, 50 if quick else 200, seed) for seed in range(1 if quick else 2)
    }
    return run_parts(parts, None)


if __name__ == "__main__":
    sys.exit(main())
