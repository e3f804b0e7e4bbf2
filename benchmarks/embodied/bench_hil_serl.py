"""HIL-SERL on gym-hil: environment steps and CPU minutes to success in 0.9 of 50 episodes, beside lerobot's.

    python -m benchmarks.embodied.bench_hil_serl [--seeds 0] [--steps 8000] [--lerobot PYTHON] [--simulator PYTHON]

A Franka picks up a cube that lies somewhere else in each episode (`PandaPickCube-v0`): states alone, a sparse reward,
100 steps at most. Both sides have the same 20 episodes of a scripted expert for half of every batch, batches of 256,
two hidden layers of 256, two critics with layer normalization, a discount of 0.97 and an initial temperature of 0.01;
for each step of the environment they take two updates of the critics and one of the policy, from step 100 on. The rest
is each side's own: rlinf's is that of the shipped `embodied/franka-rlpd-laptop`, lerobot's are the defaults of its
classes (hil_serl_baseline.py). Nobody intervenes.

CPU seconds are those of all processes, from the first step of the environment on. `--lerobot` is an interpreter with
lerobot and gym-hil (or the variable LEROBOT_PYTHON), `--simulator` one with gym-hil for rlinf (RLINF_GYM_HIL_PYTHON).
One seed takes half an hour of a core. Exits with 1 where rlinf needs more than 0.8 times the steps or the minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.meter import Meter, cpu_seconds
from benchmarks.table import Result, run_parts
from rlinf_core.runners.events import Event, StepFinished

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "benchmarks" / "baselines" / "hil_serl_baseline.py"
GOAL, SUCCESS, EPISODES = 0.8, 0.9, 50
STEPS = 50
CONFIG = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {{node_group: node, placement: 0}}
    env: {{node_group: gym_hil, placement: 0}}
  node_groups:
    - label: gym_hil
      node_ranks: 0
      env_configs:
        - node_ranks: 0
          python_interpreter_path: {simulator}
          env_vars: [{{MUJOCO_GL: egl}}]
data: {{train_data_paths: {demonstrations}}}
env:
  train:
    env_type: gym_hil
    task: gym_hil/PandaPickCube-v0
    total_num_envs: 1
    max_steps_per_rollout_epoch: {steps}
    seed: {seed}
    options: {{cameras: [], arguments: {{random_block_position: true}}}}
actor:
  seed: {seed}
  global_batch_size: 256
  model: {{model_type: squashed_policy, hidden_dim: 256}}
  optim: {{lr: 1e-3, adam_eps: 1e-8, clip_grad: 10}}
algorithm:
  loss_type: sac
  gamma: 0.97
  normalize_observations: true
  update_to_data: 2
  policy_interval: 2
  learning_starts: 100
  n_steps: 3
  critics: 2
  critic_norm: layer
  options: {{policy_values: mean, temperature: 0.01, entropy_in_target: false}}
  replay: {{capacity: 100000}}
runner:
  max_steps: {last}
  val_check_interval: -1
  save_interval: -1
  logger: {{log_path: {folder}}}
"""


class ReachedError(Exception):
    """The goal is reached: the run may end."""


class Progress(Meter):
    """A meter that prints a line of JSON after each training step, and ends the run with the goal."""

    def __init__(self) -> None:
        super().__init__([])
        self._steps = 0
        self._successes = deque[bool]([False] * EPISODES, EPISODES)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if not isinstance(event, StepFinished):
            return
        metrics = self.times[-1]
        self._steps += int(metrics["env/steps"])
        episodes = round(metrics.get("env/episodes", 0))
        solved = round(metrics.get("env/success_once", 0) * episodes)
        self._successes.extend([True] * solved + [False] * (episodes - solved))
        begun = self.marks[0][0]
        cpu = sum(seconds - begun.get(pid, 0.0) for pid, seconds in cpu_seconds().items())
        row = {"steps": self._steps, "episodes": episodes, "solved": solved, "cpu_seconds": round(cpu, 1)}
        print(json.dumps(row | {"reached": reached(self._successes)}), flush=True)
        if reached(self._successes):
            raise ReachedError


def reached(successes: deque[bool]) -> bool:
    """Return whether enough of the last episodes ended with success."""
    return sum(successes) >= SUCCESS * EPISODES


def rlinf(**settings: Any) -> None:
    """Run `rlinf train` in this process, with the settings of `CONFIG`."""
    from rlinf_core.job.load import load_job
    from rlinf_core.runners.storage.run_folder import RunFolder

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(CONFIG.format(**settings, steps=STEPS, folder=folder))
        job = load_job(str(file))
        program = job.recipe.load(job.recipe.program) if job.recipe is not None and job.diagnostics.ok else None
        if program is None or job.config is None or job.recipe is None:
            raise SystemExit("\n".join(map(str, job.diagnostics)))
        config: Any = job.config
        try:
            program(job, RunFolder.create(config.runner, job.recipe.name), Progress())
        except ReachedError:
            return


def demonstrations(simulator: str, folder: Path) -> tuple[Path, Path]:
    """Record 20 episodes; return their folder, and the file that has them as arrays."""
    from recipes.demonstrations import load_demonstrations

    path, file = folder / "demonstrations", folder / "job.yaml"
    settings = {"simulator": simulator, "demonstrations": path, "seed": 1_000_000, "last": 1}
    file.write_text(CONFIG.format(**settings, steps=STEPS, folder=folder))
    run([sys.executable, "-m", "rlinf_cli", "record", str(file), "-o", str(path), "-n", "20", "--successes-only"])
    data = load_demonstrations([str(path)])
    if data.states is None or data.rewards is None or data.successes is None:
        raise SystemExit(f"{path} has no states or no rewards")
    # After the last step of an episode nothing follows: it ended with success.
    following = np.concatenate((data.states[1:], data.states[-1:]))
    arrays = folder / "demonstrations.npz"
    columns = {"states": data.states, "next_states": following, "actions": data.actions}
    np.savez(arrays, **columns, rewards=data.rewards, dones=data.successes)
    return path, arrays


def run(command: list[str]) -> list[str]:
    """Return the lines that a process of its own printed."""
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=6 * 3600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "RLINF_ADDRESS": "local"}
        | {"MUJOCO_GL": "egl"},
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return [line for line in result.stdout.splitlines() if line.startswith("{")]


def compare(seed: int, args: argparse.Namespace, path: Path, arrays: Path) -> list[Result]:
    """Return steps and CPU time of rlinf in terms of lerobot's, with one seed."""
    baseline = [args.lerobot, str(BASELINE), str(arrays), str(seed), str(args.steps)]
    settings = {"simulator": args.simulator, "demonstrations": str(path), "seed": seed, "last": args.steps // STEPS}
    ours = [sys.executable, "-m", "benchmarks.embodied.bench_hil_serl", "--run", json.dumps(settings)]
    theirs, own = (json.loads(run(command)[-1]) for command in (baseline, ours))
    results: list[Result] = []
    for name, key, unit in (("steps", "steps", 1), ("CPU minutes", "cpu_seconds", 60)):
        ratio = own[key] / theirs[key]
        # A run that ended without it would have needed more.
        bound = "< " if not theirs["reached"] else ""
        ours_said, theirs_said = (
            f"{row[key] / unit:.1f}{'' if row['reached'] else ' without it'}" for row in (own, theirs)
        )
        figure = f"{bound}{ratio:.2f}x" if own["reached"] else "-"
        met = own["reached"] and ratio <= GOAL
        what = f"{name} to {SUCCESS} of {EPISODES} episodes, seed {seed}"
        results.append(Result(what, f"{ours_said} against {theirs_said}", figure, "<= 0.8x", met))
    return results


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        rlinf(**json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--lerobot", default=os.environ.get("LEROBOT_PYTHON"), metavar="PYTHON")
    parser.add_argument("--simulator", default=os.environ.get("RLINF_GYM_HIL_PYTHON"), metavar="PYTHON")
    args = parser.parse_args()
    if args.lerobot is None or args.simulator is None:
        print("LEROBOT_PYTHON or RLINF_GYM_HIL_PYTHON names no interpreter")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path, arrays = demonstrations(args.simulator, Path(folder))
        return run_parts(
            {str(seed): lambda seed=seed: compare(seed, args, path, arrays) for seed in args.seeds},
            None,
        )


if __name__ == "__main__":
    sys.exit(main())
