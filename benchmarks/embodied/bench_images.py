"""CPU time of training on images by the embodied recipe, against one process and one loop.

    python benchmarks/embodied/bench_images.py [--steps 6] [--rounds 3]

64 environments, each of which two cameras of 128 x 128 pixels look at, and a policy of convolutions. The renderer is a
stand-in that computes about a millisecond for an image, as a fast one does on an accelerator; it runs in a simulator
process beside the env worker, so that every image passes through shared memory, the env worker, the rollout worker and
the actor. The loop renders in its own process. CPU time is that of all processes; both learn once from every sample.
They take turns. Processes of the recipe keep freed memory for later, which spares the time to clear its pages; the
second line compares with a loop that does so too. The third tells what processes took that are there whatever the
workers do, and the longer the more. Exits with 1 when the goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.baselines.single_process_ppo import Loop
from benchmarks.embodied.bench_embodied import run
from benchmarks.meter import Meter
from benchmarks.table import Result, run_parts
from recipes.embodied.config import EmbodiedActorConfig
from recipes.embodied.config.algorithm_config import ActorCriticConfig
from recipes.embodied.config.env_config import TrainEnvironmentConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.processes.simulated_env import SimulatedEnv
from recipes.embodied.envs.processes.simulator import Outcome, Row, Simulation, Start
from recipes.training.host_memory import keep_freed_memory

ENVS, PIXELS, CAMERAS, STEPS = 64, 128, ("main", "wrist"), 10
WAVES = 12
HERE = "benchmarks.embodied.bench_images"
GOAL = 1.05


@cache
def _scene() -> NDArray[np.float32]:
    """Return the distance of every pixel from a corner, [H, W, 3]."""
    line = np.linspace(0, 6, PIXELS, dtype=np.float32)
    x, y, color = np.meshgrid(line, line, np.arange(3, dtype=np.float32))
    return x + 2 * y + color


class RenderedSimulation(Simulation):
    """Waves that actions move, seen by two cameras."""

    max_episode_steps = STEPS

    def __init__(self, task: str, options: dict[str, Any]) -> None:
        self._phase = 0.0

    @property
    def spec(self) -> EnvSpec:
        """States, and two cameras."""
        return EnvSpec(4, 2, cameras=dict.fromkeys(CAMERAS, (PIXELS, PIXELS, 3)))

    def reset(self, start: Start) -> None:
        """See `Simulation`."""
        self._phase = float(start.seed % 7)

    def step(self, action: Any) -> Outcome:
        """See `Simulation`."""
        self._phase += float(action[0])
        return Outcome(-abs(self._phase))

    def observe(self) -> Row:
        """See `Simulation`; about a millisecond for each image."""
        row: Row = {"states": np.full(4, self._phase, np.float32)}
        for number, camera in enumerate(CAMERAS):
            picture = np.full((PIXELS, PIXELS, 3), 128, np.float32)
            for wave in range(1, 1 + WAVES):
                picture += (120 / WAVES) * np.sin(wave * _scene() + (self._phase + number))
            row[f"images.{camera}"] = picture.astype(np.uint8)
        return row


class RenderedEnv(SimulatedEnv):
    """Such simulations in their own process."""

    simulation: ClassVar[str] = f"{HERE}:RenderedSimulation"
    default_task: ClassVar[str] = "waves"


def milliseconds_of_an_image() -> float:
    """Return how long the renderer computes for one image."""
    simulation = RenderedSimulation("", {})
    begun = time.process_time()
    for _ in range(200):
        simulation.observe()
    return (time.process_time() - begun) * 1e3 / 200 / len(CAMERAS)


def loop_seconds(steps: int) -> float:
    """Return CPU seconds of some training steps of the loop."""
    env = TrainEnvironmentConfig.model_validate(
        {
            "env_type": f"{HERE}:RenderedEnv",
            "total_num_envs": ENVS,
            "max_steps_per_rollout_epoch": STEPS,
        }
    )
    actor = EmbodiedActorConfig.model_validate({"model": {"model_type": "cnn_policy"}})
    loop = Loop(env, actor, ActorCriticConfig.model_validate({"update_epoch": 1}))
    loop.learn(loop.rollout())
    begun = time.process_time()
    for _ in range(steps):
        loop.learn(loop.rollout())
    return time.process_time() - begun


def recipe_seconds(steps: int) -> tuple[float, float, float]:
    """Return CPU seconds of as many training steps of the recipe, of all processes; those of Ray's processes, the
    manager, the channel and the driver among them; and seconds that passed."""
    meter = Meter([2, 2 + steps])
    run(
        meter,
        f"env.train.env_type={HERE}:RenderedEnv",
        "env.train.task=null",
        f"env.train.total_num_envs={ENVS}",
        f"env.train.max_steps_per_rollout_epoch={STEPS}",
        f"env.train.max_episode_steps={STEPS}",
        "env.train.auto_reset=false",
        "actor.model.model_type=cnn_policy",
        "algorithm.update_epoch=1",
        f"runner.max_steps={2 + steps}",
        "runner.val_check_interval=-1",
        "runner.val_before_train=false",
        "runner.save_interval=-1",
    )
    marks = 2, 2 + steps
    return meter.cpu(*marks), meter.background_cpu(*marks), meter.wall(*marks)


def keeping_seconds(steps: int) -> float:
    """Return CPU seconds of the loop in its own process, which keeps freed memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(_keeping_seconds, steps).result()


def _keeping_seconds(steps: int) -> float:
    torch.set_num_threads(1)
    keep_freed_memory()
    return loop_seconds(steps)


def images(steps: int, rounds: int) -> list[Result]:
    """Return the CPU time of the recipe in terms of the loop's."""
    torch.set_num_threads(1)
    rendering = milliseconds_of_an_image()
    loops, keeping, timings = list[float](), list[float](), list[tuple[float, float, float]]()
    for _ in range(rounds):
        loops.append(loop_seconds(steps))
        timings.append(recipe_seconds(steps))
        keeping.append(keeping_seconds(steps))
    recipes, background, wall = ([*column] for column in zip(*timings, strict=True))
    ratios = [ours / theirs for ours, theirs in zip(recipes, loops, strict=True)]
    kept = [ours / theirs for ours, theirs in zip(recipes, keeping, strict=True)]
    ratio = statistics.median(ratios)
    measured = (
        f"{min(ratios):.2f} to {max(ratios):.2f}; {_listed(recipes)} cpu-s, {_listed(loops)} of the loop;"
        f" {steps} steps of {ENVS} x {STEPS}, {rendering:.2f} ms an image"
    )
    beside = f"{min(kept):.2f} to {max(kept):.2f}; {_listed(keeping)} of the loop"
    share = statistics.median(aside / loop for aside, loop in zip(background, keeping, strict=True))
    aside = f"{_listed(background)} cpu-s in {_listed(wall)} s: Ray's processes, manager, channel and driver"
    return [
        Result(f"CPU time with {ENVS} x 2 images of 128 x 128", measured, f"{ratio:.2f}x", "<= 1.05x", ratio <= GOAL),
        Result("the same beside a loop that keeps freed memory", beside, f"{statistics.median(kept):.2f}x", "-", True),
        Result("of that, processes beside the workers", aside, f"{share:.2f}x", "-", True),
    ]


def _listed(seconds: Sequence[float]) -> str:
    return ", ".join(f"{second:.1f}" for second in seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    return run_parts({"images": lambda: images(args.steps, args.rounds)}, None)


if __name__ == "__main__":
    sys.exit(main())
