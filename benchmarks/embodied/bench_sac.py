"""SAC on Pendulum: CPU seconds of as many updates as Stable-Baselines3 takes, in the same run.

    python -m benchmarks.embodied.bench_sac [--seeds 0 1] [--updates 3000] [--baselines PYTHON]

One environment and one update for each of its steps; networks, batches, learning rate and buffer as Stable-Baselines3
has them by default. CPU seconds are those of all processes, Ray's included, from the first step of the environment on;
start-up is left out for both. Stable-Baselines3 runs before and after rlinf. It needs `pip install stable-baselines3`,
here or in the environment whose interpreter `--baselines` names (or the variable BASELINES_PYTHON).
Exits with 1 when rlinf needs more than 1.3 times the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.meter import Meter
from benchmarks.table import Result, run_parts

ROOT = Path(__file__).parents[2]
LEARNING_STARTS, STEPS = 100, 100
GOAL = 1.3
CONFIG = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout,env: {{node_group: node, placement: 0}}
env:
  train:
    env_type: gymnasium
    task: Pendulum-v1
    total_num_envs: 1
    max_steps_per_rollout_epoch: {steps}
    seed: {seed}
  eval: {{total_num_envs: 20}}
actor:
  seed: {seed}
  global_batch_size: 256
  model: {{model_type: squashed_policy, hidden_dim: 256}}
  optim: {{lr: 3e-4, adam_eps: 1e-8, weight_decay: 0, clip_grad: 0}}
algorithm:
  loss_type: sac
  gamma: 0.99
  update_to_data: 1
  learning_starts: {starts}
  random_steps: {starts}
runner:
  max_steps: {last}
  val_check_interval: {last}
  val_before_train: false
  save_interval: -1
  logger: {{log_path: {folder}}}
"""


def rlinf(seed: int, updates: int) -> dict[str, Any]:
    """Return one run of `rlinf train`, in this process."""
    from rlinf_core.job.load import load_job
    from rlinf_core.runners.storage.run_folder import RunFolder

    last = (LEARNING_STARTS + updates) // STEPS
    meter = Meter([last])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(CONFIG.format(seed=seed, steps=STEPS, starts=LEARNING_STARTS, last=last, folder=folder))
        job = load_job(str(file))
        program = job.recipe.load(job.recipe.program) if job.recipe is not None and job.diagnostics.ok else None
        if program is None or job.config is None or job.recipe is None:
            raise SystemExit("\n".join(map(str, job.diagnostics)))
        config: Any = job.config
        program(job, RunFolder.create(config.runner, job.recipe.name), meter)
    taken = meter.times[-1]["train/updates"]
    score = meter.evaluations[last]["eval/return"]
    return {"cpu_seconds": meter.cpu(0, last), "updates": int(taken), "score": score}


def measured(command: list[str], seed: int, updates: int) -> dict[str, Any]:
    """Return one run in its own process."""
    result = subprocess.run(
        [*command, str(seed), str(updates)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "RLINF_ADDRESS": "local"},
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def compare(seed: int, updates: int, baselines: str) -> list[Result]:
    """Return the CPU time of rlinf in terms of that of Stable-Baselines3."""
    theirs = [baselines, str(ROOT / "benchmarks" / "baselines" / "sac_baseline.py")]
    before = measured(theirs, seed, updates)
    ours = measured([sys.executable, "-m", "benchmarks.embodied.bench_sac", "--run"], seed, updates)
    after = measured(theirs, seed, updates)
    ratio = ours["cpu_seconds"] / statistics.mean((before["cpu_seconds"], after["cpu_seconds"]))
    said = (
        f"{ours['cpu_seconds']:.1f} cpu-s for {ours['updates']} updates against {before['cpu_seconds']:.1f} and"
        f" {after['cpu_seconds']:.1f} for {before['updates']}; greedy return {ours['score']:.0f}, theirs"
        f" {before['score']:.0f}"
    )
    met = ratio <= GOAL and ours["updates"] >= before["updates"]
    return [Result(f"CPU time of SAC on Pendulum, seed {seed}", said, f"{ratio:.2f}x", f"<= {GOAL}x", met)]


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(rlinf(int(sys.argv[2]), int(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--baselines", default=os.environ.get("BASELINES_PYTHON", sys.executable), metavar="PYTHON")
    args = parser.parse_args()
    return run_parts(
        {str(seed): lambda seed=seed: compare(seed, args.updates, args.baselines) for seed in args.seeds}, None
    )


if __name__ == "__main__":
    sys.exit(main())
