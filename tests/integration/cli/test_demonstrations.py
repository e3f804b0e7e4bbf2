"""From demonstrations to a policy, its evaluation, and reinforcement learning: by the commands that a person types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder

RLINF = Path(sys.executable).with_name("rlinf")
# Four commands with a Ray of their own each, on a machine that may be slow.
pytestmark = pytest.mark.timeout(900)

# A policy and batches that are the same in all of them.
SMALL = (
    "env.train.total_num_envs=8",
    "env.eval.total_num_envs=8",
    "actor.model.hidden_dim=32",
    "actor.global_batch_size=80",
    "runner.max_steps=2",
)


def rlinf(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [RLINF, *arguments],
        cwd=folder,
        env={**os.environ, "RLINF_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluated(folder: Path, run: Path, out: str) -> dict[str, Any]:
    """Return `eval.json` without the one key that says when it was made."""
    return evaluation(folder, out, str(run))


def evaluation(folder: Path, out: str, *arguments: str) -> dict[str, Any]:
    rlinf(folder, "eval", *arguments, "-o", out)
    loaded: dict[str, Any] = json.loads((folder / out / "eval.json").read_text())
    del loaded["times"]
    return loaded


@pytest.mark.nightly
def test_demonstrations_teach_a_policy_whose_evaluation_repeats(tmp_path: Path) -> None:
    rlinf(tmp_path, "record", "laptop", "-o", "shown", "-n", "4")
    rlinf(tmp_path, "train", "recipe=sft", "data.train_data_paths=shown", "runner.val_check_interval=-1", *SMALL)
    (learned,) = (tmp_path / "runs").glob("sft-*")
    losses = [record.metrics["train/actor/bc_loss"] for record in read_metrics(learned / "metrics.jsonl")]
    assert len(losses) == 2
    assert losses[1] < losses[0]

    first = evaluated(tmp_path, learned, "first")
    assert json.dumps(first) == json.dumps(evaluated(tmp_path, learned, "second"))
    assert first["total"]["episodes"] == 8
    assert all((tmp_path / "first" / video["file"]).stat().st_size for video in first["videos"])
    assert first["videos"]

    # What is exported is evaluated as the model that a file begins with.
    rlinf(tmp_path, "export", str(learned), "--format", "safetensors", "-o", "policy")
    pretrained = evaluation(tmp_path, "third", "laptop", "actor.model.model_path=policy", *SMALL)
    assert pretrained["total"] == first["total"]
    assert pretrained["checkpoint"]["step"] is None

    newest = RunFolder.open(learned).checkpoints.latest()
    assert newest is not None
    start = f"actor.checkpoint_load_path={newest.path}"
    filmed = "env.eval.video_cfg.save_video=true"
    rlinf(tmp_path, "train", "laptop", start, "runner.val_check_interval=1", filmed, *SMALL)
    (continued,) = (tmp_path / "runs").glob("embodied-*")
    assert {path.name[:11] for path in (continued / "videos").iterdir()} == {f"step-00000{step}" for step in range(3)}
    begun = read_metrics(continued / "metrics.jsonl")[0]
    # The weights are those that were evaluated, before the first step.
    assert begun.step == 0
    assert begun.metrics["eval/return"] == pytest.approx(first["total"]["return"], rel=1e-5)
