"""Contact tasks learned from nothing: CPU time until greedy episodes succeed, of the shipped pick and place in MuJoCo.

    python benchmarks/runtime/bench_contact.py [--quick] [--only pick|place] [--seeds 0 1 2]

CPU time is that of all processes of the run, driver and Ray's own included, from the moment when the workers are
there, and with the evaluations before the one that counts. Evaluations are of 256 starts that training has not seen.
Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from benchmarks.meter import Meter
from benchmarks.table import Result, run_parts
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.program import program
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import RunFolder

SUCCESS = 0.95


class Task(NamedTuple):
    """A task, and its goal.

    Attributes:
        config: the configuration that is shipped.
        limit: CPU seconds.
        seeds: how many are asked for.
    """

    config: str
    limit: float
    seeds: int


TASKS = {"pick": Task("embodied/franka-pick-laptop", 100, 3), "place": Task("embodied/franka-place-laptop", 400, 2)}


def learn(name: str, seed: int) -> list[Result]:
    """Return when greedy success was reached, and what it was at the end."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder:
        overrides = (f"runner.logger.log_path={folder}", f"actor.seed={seed}", f"env.train.seed={seed}")
        job = load_job(task.config, overrides, environ={})
        job.raise_if_bad()
        config = cast("EmbodiedConfig", job.config)
        last, interval = config.runner.max_steps, config.runner.val_check_interval
        meter = Meter([*range(interval, last, interval), last])
        program(job, RunFolder.create(config.runner, "embodied"), meter)
    successes = {step: values["eval/success_at_end"] for step, values in meter.evaluations.items() if step}
    first = next((step for step in sorted(successes) if successes[step] >= SUCCESS), None)
    last = max(successes)
    curve = " ".join(f"{success:.2f}" for _, success in sorted(successes.items()))
    spent = meter.cpu(0, last if first is None else first)
    when = f"step {first}, {meter.wall(0, first):.0f} s" if first is not None else f"not in {last} steps"
    is_met = first is not None and spent <= task.limit
    return [
        Result(f"{name}: cpu-s to {SUCCESS}, seed {seed}", when, f"{spent:.0f}", f"<= {task.limit:g}", is_met),
        Result(
            f"{name}: greedy success at the end, seed {seed}",
            f"{meter.cpu(0, last):.0f} cpu-s, {last} steps; {curve}",
            f"{successes[last]:.3f}",
            f">= {SUCCESS}",
            successes[last] >= SUCCESS,
        ),
    ]


def parts(seeds: Sequence[int] | None, *, is_quick: bool) -> dict[str, Callable[[], list[Result]]]:
    """Return the runs of each task."""

    def runs(name: str) -> list[Result]:
        chosen = seeds or range(1 if is_quick else TASKS[name].seeds)
        return [result for seed in chosen for result in learn(name, seed)]

    return {"pick": lambda: runs("pick"), "place": lambda: runs("place")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of each")
    parser.add_argument("--only", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+")
    args = parser.parse_args()
    return run_parts(parts(args.seeds, is_quick=args.quick), args.only)


if __name__ == "__main__":
    sys.exit(main())
