"""A job on reach-v3 with environments of EnvPool or of the Meta-World package, alike in all else.

    RLINF_ENVPOOL_PYTHON=/opt/venv/envpool/bin/python python -m benchmarks.embodied.pool_jobs KIND SEED STEPS

KIND is `envpool` or `metaworld`; the interpreter that the variable names needs both packages. Prints one JSON object:
environment steps after the second training step, the CPU seconds of env workers (`env`) and of the whole job (`job`)
that they took, and what was learned. Evaluations are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from benchmarks.meter import Meter, cpu_seconds
from recipes.embodied.program import launch
from rlinf_core.job.load import load_job
from rlinf_core.runners.events import Evaluated, Event, StepFinished
from rlinf_core.runners.run_program import run_job
from rlinf_core.runners.runner import Runner
from rlinf_core.runners.storage.run_folder import RunFolder

# Changes of `embodied/metaworld-reach-laptop`. Rewards of both are as the package gives them, and divided alike.
ALIKE = (
    "algorithm.normalize_rewards=true",
    "runner.val_before_train=false",
    "runner.save_interval=-1",
    # Steps of a repeated attempt would be counted twice.
    "runner.max_restarts=0",
    # Both are evaluated in the Meta-World package.
    "env.eval.env_type=metaworld",
    "env.eval.task=reach-v3",
    "env.eval.options={goal_seed: 1, reward_scale: 1}",
)
KINDS = {
    "metaworld": ("env.train.options.reward_scale=1",),
    "envpool": (
        "env.train.env_type=envpool",
        "env.train.task=MetaWorld/Reach-v3",
        "~env.train.options.reward_scale",
        "env.train.options.partially_observable=false",
    ),
}
# Steps before the first mark: imports and first allocations are over.
SETTLED = 2


class EnvMeter(Meter):
    """A meter that counts env workers and their simulator processes apart.

    Attributes:
        env_cpu: CPU seconds of these processes by step.
        runner: the loop, once it is there.
    """

    def __init__(self, steps: int) -> None:
        super().__init__([SETTLED, steps])
        self.env_cpu: dict[int, float] = {}
        self.runner: Runner | None = None

    def __call__(self, event: Event) -> None:
        """See `Meter`."""
        super().__call__(event)
        if isinstance(event, StepFinished) and event.step in self.steps and self.runner is not None:
            group: Any = self.runner.groups["env"]
            roots = {member.pid for member in group._members}
            seconds = cpu_seconds()
            self.env_cpu[event.step] = sum(seconds[pid] for pid in seconds if _descends(pid, roots))


def _descends(pid: int, roots: set[int]) -> bool:
    """Return whether a process is one of `roots` or was started below one."""
    while pid > 1:
        if pid in roots:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False  # it has ended
    return False


def measure(kind: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the figures of one job.

    Args:
        kind: a key of `KINDS`.
        seed: the seed of the environments and of the policy.
        steps: the number of training steps, above `SETTLED`.
    """
    meter, curve, success = EnvMeter(steps), list[float](), float("nan")

    def listen(event: Event) -> None:
        nonlocal success
        meter(event)
        if isinstance(event, StepFinished):
            curve.append(event.metrics.get("env/return", float("nan")))
        elif isinstance(event, Evaluated):
            success = event.metrics["eval/success_at_end"]

    def launched(config: Any, cluster: Any, record: Any) -> Runner:
        meter.runner = launch(config, cluster, record)
        return cast("Runner", meter.runner)

    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder:
        length = (f"runner.max_steps={steps}", f"runner.val_check_interval={steps}")
        settings = (*length, f"runner.logger.log_path={folder}")
        seeds = (f"actor.seed={seed}", f"env.train.seed={1000 * seed}")
        environ = {**os.environ, "RLINF_METAWORLD_PYTHON": os.environ["RLINF_ENVPOOL_PYTHON"]}
        job = load_job("embodied/metaworld-reach-laptop", (*ALIKE, *KINDS[kind], *settings, *seeds), environ=environ)
        job.raise_if_bad()
        config: Any = job.config
        run_job(job, RunFolder.create(config.runner, "embodied"), listen, launched)
    taken = sum(int(row["env/steps"]) for row in meter.times[SETTLED:])
    return {
        "steps": taken,
        "env": meter.env_cpu[steps] - meter.env_cpu[SETTLED],
        "job": meter.cpu(SETTLED, steps),
        "seconds": meter.wall(SETTLED, steps),
        "curve": curve,
        "success": success,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
