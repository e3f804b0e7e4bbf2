"""The embodied recipe against one process: CPU time of training, overhead of a step, pipelining, and weight sync.

    python benchmarks/embodied/bench_embodied.py [--quick] [--only PART] [--seeds 0 1 2]

CPU time is that of all processes of the run: driver, workers, channels, and Ray's own; start-up is told apart. The
loop that it is compared with runs in the same call, before and after. Latencies are those of an environment and a
policy that sleep. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.baselines import single_process_ppo
from benchmarks.meter import Meter
from benchmarks.table import Result, run_parts
from recipes.embodied.config import EmbodiedConfig, EmbodiedModelConfig
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts
from recipes.embodied.models.base_policy import Inputs, PolicyOutput
from recipes.embodied.models.feature_policy import MlpPolicy
from recipes.embodied.program import program
from recipes.training.weights.weight_sync import FlatWeights
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.job.load import Job, load_job
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker import Worker

MB = 1 << 20


# What a run costs


def shipped(*overrides: str) -> tuple[Job, EmbodiedConfig]:
    """Return what `rlinf train recipe=embodied` runs."""
    job = load_job("embodied/pick-laptop", overrides, environ={})
    job.raise_if_bad()
    return job, cast("EmbodiedConfig", job.config)


def run(meter: Meter, *overrides: str) -> None:
    """Run the recipe in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder:
        job, config = shipped(f"runner.logger.log_path={folder}", *overrides)
        program(job, RunFolder.create(config.runner, "embodied"), meter)


def training(seeds: Sequence[int], steps: int) -> list[Result]:
    """Whole training of pick by the recipe, and the CPU time of as many steps of the loop; what the policy can do then.

    Goals are those of a whole training: fewer steps are not asked for success.
    """
    results: list[Result] = []
    torch.set_num_threads(1)
    whole = shipped()[1].runner.max_steps
    for seed in seeds:
        words = ["--steps", str(steps), "--every", str(steps)]
        before = single_process_ppo.run(single_process_ppo.arguments(words), seed)
        meter = Meter([steps])
        lasts = (f"runner.max_steps={steps}", f"runner.val_check_interval={steps}", "runner.save_interval=-1")
        lasts = (*lasts, "runner.val_before_train=false")
        run(meter, *lasts, f"env.train.seed={seed}", f"actor.seed={seed}", "env.eval.total_num_envs=256")
        after = single_process_ppo.run(single_process_ppo.arguments(words), seed)
        loop = statistics.mean(step.rollout + step.training for step in (before, after))
        ours = meter.cpu(0, steps)
        ratio = ours / loop
        cost = (
            f"{ours:.1f} cpu-s against {loop:.1f} of the loop, {meter.wall(0, steps):.0f} s,"
            f" start-up {meter.startup:.0f} s apart"
        )
        results.append(
            Result(f"CPU time of {steps} steps of pick, seed {seed}", cost, f"{ratio:.2f}x", "<= 2x", ratio <= 2)
        )
        if steps == whole:
            success = meter.evaluations[steps].get("eval/success_at_end", 0.0)
            measured = f"256 starts that training has not seen; the loop {after.success:.3f}"
            results.append(
                Result(f"greedy success then, seed {seed}", measured, f"{success:.3f}", ">= 0.9", success >= 0.9)
            )
    return results


# What a step costs


def overhead(steps: int) -> list[Result]:
    """Return what the way to the policy and back adds to a step: how long environments wait, less what the policy
    takes.
    """
    meter = Meter([])
    run(meter, f"runner.max_steps={steps}", "runner.val_check_interval=-1", "runner.save_interval=-1")
    spent = [row["time/env/wait"] - row["time/rollout/policy"] for row in meter.times[2:]]
    whole = statistics.median(row["time/generate_rollouts"] for row in meter.times[2:]) / 50 * 1e3
    step = statistics.median(spent) / 50 * 1e3
    low, _, high = (quantile / 50 * 1e3 for quantile in statistics.quantiles(spent, n=4))
    measured = f"quarters {low:.2f} to {high:.2f} ms; a rollout in all takes {whole:.2f} ms a step"
    return [Result("overhead of a step of 64 environments", measured, f"{step:.2f} ms", "< 0.5 ms", step < 0.5)]


LATENCY = 0.01


class SlowEnv(VectorEnv):
    """Takes `LATENCY` for a step, without computing."""

    @property
    def spec(self) -> EnvSpec:
        """See `VectorEnv`."""
        return EnvSpec(state_size=4, action_size=2)

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self._states = np.zeros((settings.num_envs, 4), np.float32)

    def _start(self, rows: IntArray, starts: Starts) -> None:
        pass

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        time.sleep(LATENCY)
        nothing = np.zeros(self.num_envs, np.float32)
        return Transition(rewards=nothing, terminations=nothing.astype(np.bool_))

    def _observe(self) -> Observation:
        return {"states": self._states}


class SlowPolicy(MlpPolicy):
    """Takes `LATENCY` for an output, without computing."""

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)

    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`."""
        time.sleep(LATENCY)
        return super().act(inputs, greedy=greedy, generator=generator)


def pipelining() -> list[Result]:
    """Time of a rollout with two stages against one; a stage of half the environments takes as long as a whole one.

    So that the work is the same, one stage makes two passes of half the environments, and two stages one of all.
    """
    taken: dict[int, float] = {}
    for stages in (1, 2):
        meter = Meter([])
        run(
            meter,
            "env.train.env_type=benchmarks.embodied.bench_embodied:SlowEnv",
            "env.train.task=null",
            "actor.model.model_type=benchmarks.embodied.bench_embodied:SlowPolicy",
            f"rollout.pipeline_stage_num={stages}",
            f"env.train.total_num_envs={8 * stages}",
            f"env.train.rollout_epoch={2 // stages}",
            "actor.global_batch_size=800",
            "runner.max_steps=5",
            "runner.val_check_interval=-1",
            "runner.save_interval=-1",
        )
        taken[stages] = statistics.median(row["time/generate_rollouts"] for row in meter.times[1:])
    ratio = taken[2] / taken[1]
    measured = f"{taken[2]:.2f} s against {taken[1]:.2f} s, where env and policy take {LATENCY * 1e3:.0f} ms each"
    return [Result("rollout with 2 stages against 1", measured, f"{ratio:.2f}x", "<= 0.6x", ratio <= 0.6)]


# Weights


class Sender(Worker):
    """Stands for the actor: sends weights as it does."""

    def warm(self, size: int) -> None:
        torch.set_num_threads(1)
        self.weights = FlatWeights({"weight": torch.ones(size // 4)})

    def give(self, receivers: int) -> float:
        begun = time.perf_counter()
        self.broadcast((1, self.weights.buffers), [("receivers", range(receivers))], ("senders", 0))
        return time.perf_counter() - begun

    def copy(self) -> float:
        source = self.weights.buffers[0]
        target = torch.ones_like(source)
        begun = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begun


class Receiver(Worker):
    """Stands for a rollout worker."""

    def warm(self, size: int) -> None:
        torch.set_num_threads(1)
        self.weights = FlatWeights({"weight": torch.zeros(size // 4)})

    def take(self, receivers: int) -> float:
        begun = time.perf_counter()
        _, buffers = self.broadcast(None, [("receivers", range(receivers))], ("senders", 0))
        for mine, theirs in zip(self.weights.buffers, buffers, strict=True):
            mine.copy_(theirs)
        return time.perf_counter() - begun


def weight_sync(rounds: int) -> list[Result]:
    """100 MB to two rollout workers, each against a copy of 100 MB within a process."""
    size, ratios = 100 * MB, list[float]()
    with Cluster(num_nodes=1) as cluster:
        senders = Sender.create_group().launch(cluster, NodePlacementStrategy([0]), name="senders")
        receivers = Receiver.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="receivers")
        senders.warm(size).wait()
        receivers.warm(size).wait()
        for number in range(rounds + 2):
            copied = senders.copy().wait()[0]
            taking, giving = receivers.take(2), senders.give(2)
            seconds = max(*taking.wait(), *giving.wait())
            if number >= 2:
                ratios.append(copied / seconds)
    middle = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    measured = f"quarters {low:.2f} to {high:.2f}; both at a time, the slower one against one memcpy"
    return [Result("weight sync, 100 MB to each of 2 rollouts", measured, f"{middle:.2f}x", ">= 0.3x", middle >= 0.3)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and few steps")
    parser.add_argument("--only", choices=["overhead", "pipelining", "weights", "training"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    seeds = args.seeds[:1] if args.quick else args.seeds
    parts: dict[str, Callable[[], list[Result]]] = {
        "overhead": lambda: overhead(20 if args.quick else 40),
        "pipelining": pipelining,
        "weights": lambda: weight_sync(5 if args.quick else 15),
        "training": lambda: training(seeds, 20 if args.quick else shipped()[1].runner.max_steps),
    }
    return run_parts(parts, args.only)


if __name__ == "__main__":
    sys.exit(main())
