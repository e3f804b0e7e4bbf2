"""CartPole: CPU seconds until it counts as solved, against Stable-Baselines3 and RLlib in the same run.

    python -m benchmarks.embodied.bench_cartpole [--seeds 0 1 2] [--baselines PYTHON]

Solved is what Gymnasium says: a mean return of 475 over 100 training episodes in a row. CPU seconds are those of all
processes, Ray's included, from the first training step on; start-up is left out for everyone. The two others need
`pip install stable-baselines3 'ray[rllib]'`, here or in the environment whose interpreter `--baselines` names (or the
variable BASELINES_PYTHON). Each has hyperparameters that its own project tuned for this task; ours are those of
configs/embodied/cartpole-laptop.yaml.
Exits with 1 when rlinf needs more CPU seconds than Stable-Baselines3, or makes fewer steps in one than RLlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.baselines.cartpole_baselines import tree_cpu_seconds

ROOT = Path(__file__).parents[2]
TARGET, MAX_STEPS = 475.0, 400_000
# The shipped configuration; the others evaluate nothing and write no checkpoint either.
CONFIG = "embodied/cartpole-laptop"
OVERRIDES = ("runner.val_check_interval=-1", "runner.save_interval=-1")
NAMES = {"rlinf": "rlinf", "sb3": "Stable-Baselines3", "rllib": "RLlib"}


class StopRunError(Exception):
    """The target is reached, or the steps are used up; raised out of a listener to end the run."""


def rlinf(seed: int, target: float, max_steps: int) -> dict[str, Any]:
    """Return one run of `rlinf train` on CartPole, in this process."""
    from rlinf_core.job.load import load_job
    from rlinf_core.runners import events
    from rlinf_core.runners.storage.run_folder import RunFolder

    # The returns of the last 100 episodes; of those that end in one step the mean is known, which stands for each.
    window: deque[float] = deque(maxlen=100)
    counted = {"steps": 0, "begun": 0.0, "now": 0.0}

    def listen(event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            counted["begun"] = tree_cpu_seconds()
        elif isinstance(event, events.StepFinished):
            counted["steps"] += int(event.metrics["env/steps"])
            # Here, while the workers live.
            counted["now"] = tree_cpu_seconds()
            ended = int(event.metrics["env/episodes"])
            window.extend([event.metrics.get("env/return", 0.0)] * ended)
            solved = len(window) == window.maxlen and statistics.fmean(window) >= target
            if solved or counted["steps"] >= max_steps:
                raise StopRunError

    with tempfile.TemporaryDirectory() as folder:
        overrides = [*OVERRIDES, f"env.train.seed={seed}", f"actor.seed={seed}", f"runner.logger.log_path={folder}"]
        job = load_job(CONFIG, overrides=[*overrides, "runner.max_steps=-1"])
        if job.recipe is None or job.config is None or not job.diagnostics.ok:
            raise SystemExit("\n".join(map(str, job.diagnostics)))
        config: Any = job.config
        program = job.recipe.load(job.recipe.program)
        try:
            if program is not None:
                program(job, RunFolder.create(config.runner, job.recipe.name), listen)
        except StopRunError:
            pass
        return {
            "cpu_seconds": counted["now"] - counted["begun"],
            "env_steps": counted["steps"],
            "reached": len(window) == window.maxlen and statistics.fmean(window) >= target,
        }


def measured(name: str, seed: int, python: str) -> dict[str, Any]:
    """Return one run in its own process."""
    command = [python, str(ROOT / "benchmarks" / "baselines" / "cartpole_baselines.py"), name]
    if name == "rlinf":
        command = [sys.executable, "-m", "benchmarks.embodied.bench_cartpole", "--run"]
    result = subprocess.run(
        [*command, str(seed), str(TARGET), str(MAX_STEPS)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def has(python: str, module: str) -> bool:
    """Return whether an interpreter has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        seed, target, max_steps = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
        print(json.dumps(rlinf(seed, target, max_steps)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--baselines", default=os.environ.get("BASELINES_PYTHON", sys.executable), metavar="PYTHON")
    args = parser.parse_args()
    needs = {"sb3": "stable_baselines3", "rllib": "tree"}
    names = ["rlinf", *(name for name, module in needs.items() if has(args.baselines, module))]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in args.seeds:
        for name in names:
            rows[name].append(measured(name, seed, args.baselines))
    print(f"{'':<20} {'cpu-s to 475':>13} {'(range)':>15} {'env steps':>10} {'steps per cpu-s':>16}")
    speeds: dict[str, float] = {}
    for name, runs in rows.items():
        seconds = sorted(row["cpu_seconds"] for row in runs)
        speeds[name] = statistics.median(row["env_steps"] / row["cpu_seconds"] for row in runs)
        missed = sum(not row["reached"] for row in runs)
        print(
            f"{NAMES[name]:<20} {statistics.median(seconds):>13.1f} {f'({seconds[0]:.1f} to {seconds[-1]:.1f})':>15}"
            f" {statistics.median(row['env_steps'] for row in runs):>10.0f} {speeds[name]:>16.0f}"
            + (f"   {missed} of {len(runs)} did not get there" if missed else "")
        )
    for name in needs:
        if name in speeds:
            print(f"rlinf does {speeds['rlinf'] / speeds[name]:.2f}x the steps per CPU second of {NAMES[name]}")
        else:
            print(f"{NAMES[name]} is not installed: pip install stable-baselines3 'ray[rllib]', or see --baselines")
    failed = not all(row["reached"] for row in rows["rlinf"])
    if "sb3" in rows:
        mine, theirs = (statistics.median(row["cpu_seconds"] for row in rows[name]) for name in ("rlinf", "sb3"))
        print(f"rlinf needs {mine / theirs:.2f}x the CPU seconds of Stable-Baselines3")
        failed |= mine > theirs
    return 1 if failed or speeds["rlinf"] < speeds.get("rllib", 0.0) else 0


if __name__ == "__main__":
    sys.exit(main())
