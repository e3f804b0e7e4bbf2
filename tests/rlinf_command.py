"""`rlinf` as a person runs it: a process of its own, in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
# What an interpreter finds that has no rlinf of its own, and a Ray that nobody else uses.
OURS = {"PYTHONPATH": str(REPOSITORY), "RLINF_ADDRESS": "local"}
# Reach, so small that a step takes milliseconds.
REACH = (
    *("env.train.task=reach", "env.train.total_num_envs=8", "env.train.max_episode_steps=10"),
    *("env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40", "actor.model.hidden_dim=16"),
)


def rlinf(
    folder: Path,
    *words: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    timeout: float = 3500,
) -> str:
    """Return what `rlinf WORDS` prints in a folder; fail with its last words where it does not succeed.

    Without `env` it has this process's variables, and a Ray of its own.
    """
    environ = env or os.environ | {"RLINF_ADDRESS": "local"}
    return output_of(python, "-m", "rlinf_cli", *words, cwd=folder, env=environ, timeout=timeout)


def output_of(
    *command: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    code: int = 0,
    errors: bool = False,
) -> str:
    """Return what a program prints, `errors` included or not; fail with its last words where it ends otherwise."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr if errors else done.stdout


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the last line of the metrics of the only run in a folder."""
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    return json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
