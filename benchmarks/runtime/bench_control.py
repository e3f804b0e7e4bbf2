"""Control of an arm beside the learner: jitter of its ticks with and without updates, and who waits for whom.

    python -m benchmarks.runtime.bench_control [--seconds 30] [--only pace|learner]

A simulated arm moves at 20 Hz in real time. Weights are pushed after every 20 ticks; in the first half of the run
nothing is learned, in the second half 4 updates for each tick. A second run asks for more updates than the machine
can do, so that data suffice. Jitter is how far the time between two actions is from 50 ms; starts of episodes, which
bring the arm to its place, are left out. On a machine without a spare core it shows the machine's scheduling, too.
Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.embodied.bench_embodied import program
from benchmarks.meter import Meter
from benchmarks.table import Result, run_parts
from recipes.embodied.envs.env_spec import IntArray, Transition
from recipes.embodied.envs.env_state import Starts
from recipes.embodied.envs.real.franka_robot import FrankaRobotEnv
from rlinf_core.job.load import load_job
from rlinf_core.runners.storage.run_folder import RunFolder

TICK, TICKS = 0.05, 20  # seconds of one, and how many there are in a training step
WARM = 5  # training steps that are left out
BUSY = 60  # updates for each tick, more than a core can do
CONFIG = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {{node_group: node, placement: 0}}
    env: {{node_group: arms, placement: 0}}
  node_groups:
    - label: arms
      node_ranks: 0
      hardware:
        type: Franka
        configs: [{{node_rank: 0, robot_ip: 127.0.0.1, robot_port: {port}}}]
env:
  train:
    env_type: benchmarks.runtime.bench_control:TimedArmEnv
    task: reach
    total_num_envs: 1
    max_episode_steps: 100
    max_steps_per_rollout_epoch: {ticks}
actor: {{global_batch_size: 64, model: {{model_type: squashed_policy, hidden_dim: 64}}}}
algorithm:
  loss_type: sac
  update_to_data: {ratio}
  learning_starts: {starts}
  replay: {{capacity: 10000}}
runner:
  max_steps: {steps}
  max_staleness: 1
  val_check_interval: -1
  save_interval: -1
  logger: {{log_path: {folder}}}
"""


def ticks_file(port: int) -> Path:
    """Return where the moments of an arm's actions are written, NaN where an episode starts."""
    return Path(tempfile.gettempdir(), f"rlinf-bench-ticks-{port}")


class TimedArmEnv(FrankaRobotEnv):
    """A Franka arm that writes down when each action is sent."""

    def _note(self, moment: float) -> None:
        with ticks_file(self._key[1]).open("ab") as file:
            file.write(np.float64(moment).tobytes())

    def _start(self, rows: IntArray, starts: Starts) -> None:
        super()._start(rows, starts)
        self._note(float("nan"))

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        self._note(time.monotonic())
        return super()._advance(actions, rows)


@contextmanager
def simulated_arm() -> Generator[int, None, None]:
    """Start the controller of an arm; gives its port."""
    command = [sys.executable, "-m", "recipes.embodied.robots.controller.simulated_controller", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            ticks_file(port).unlink(missing_ok=True)
            yield port
            ticks_file(port).unlink(missing_ok=True)
        finally:
            process.kill()


def control(steps: int, ratio: float, starts: int) -> tuple[Meter, NDArray[np.float64]]:
    """Return the metrics of a run on an arm, and the moments of its actions."""
    meter = Meter([])
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder, simulated_arm() as port:
        file = Path(folder, "job.yaml")
        file.write_text(CONFIG.format(port=port, ticks=TICKS, ratio=ratio, starts=starts, steps=steps, folder=folder))
        job = load_job(str(file))
        job.raise_if_bad()
        config: Any = job.config
        program(job, RunFolder.create(config.runner, "embodied"), meter)
        return meter, np.fromfile(ticks_file(port))


def jitter(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far the times between actions of one episode are from a tick, in milliseconds."""
    apart = np.diff(moments)
    return np.abs(apart[np.isfinite(apart)] - TICK) * 1e3


def pace(seconds: int) -> list[Result]:
    """Return the jitter with and without updates, and how the ratio is held."""
    half = int(seconds / (TICKS * TICK))
    meter, moments = control(WARM + 2 * half, 4.0, (WARM + half) * TICKS)
    actions = np.cumsum(np.isfinite(moments))
    edges = [WARM * TICKS, (WARM + half + 1) * TICKS, len(moments)]
    without, beside = (jitter(moments[(actions > first) & (actions <= last)]) for first, last in pairwise(edges))
    p99, base = (float(np.percentile(column, 99)) for column in (beside, without))
    said = (
        f"p50 {np.median(beside):.1f} ms, p99 {p99:.1f}, most {beside.max():.1f}; without updates"
        f" {np.median(without):.1f}, {base:.1f}, {without.max():.1f}"
    )
    late = float(np.mean(beside > TICK * 1e3))
    idle = statistics.mean(row["speed/env_idle"] for row in meter.times[-half + 2 :])
    taken = meter.times[-1]["train/updates"] / max(1.0, (len(meter.times) - WARM - half) * TICKS)
    return [
        Result("p99 jitter of a tick beside the learner", said, f"{p99:.1f} ms", "< 10 ms", p99 < 10),
        Result("ticks that a whole tick was missed in", f"{len(beside)} ticks", f"{late:.2%}", "0", late == 0),
        Result("updates for each tick", "4 asked for", f"{taken:.2f}", "4", abs(taken - 4) < 0.01),
        Result("arm idle", "mean of the steps with updates", f"{idle:.1%}", "< 5%", idle < 0.05),
    ]


def learner(seconds: int) -> list[Result]:
    """Return how long the learner does nothing where data suffice."""
    steps = max(4, int(seconds / 5))
    meter, _ = control(WARM + steps, BUSY, TICKS)
    idle = statistics.mean(row["speed/learner_idle"] for row in meter.times[WARM:])
    arm = statistics.mean(row["speed/env_idle"] for row in meter.times[WARM:])
    said = f"{BUSY} updates a tick asked for, {meter.times[-1]['train/updates_per_env_step']:.0f} taken; arm {arm:.0%}"
    return [Result("learner idle where data suffice", said, f"{idle:.1%}", "< 5%", idle < 0.05)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30, help="of the arm, with and without updates each")
    parser.add_argument("--only", choices=["pace", "learner"])
    args = parser.parse_args()
    return run_parts({"pace": lambda: pace(args.seconds), "learner": lambda: learner(args.seconds)}, args.only)


if __name__ == "__main__":
    sys.exit(main())
