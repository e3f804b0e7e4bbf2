"""The recording of scripts that start a job of verl, on two of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.conformance.imports import job_file, verdicts

CONFIG = """
actor_rollout_ref:
  model: {path: x}
  rollout: {name: vllm, n: 1}
  actor: {ppo_mini_batch_size: 256, loss_agg_mode: token-mean, policy_loss: {loss_mode: vanilla}}
algorithm: {adv_estimator: gae}
trainer: {nnodes: 1, n_gpus_per_node: 8, logger: [console], total_training_steps: null}
data: {train_files: a.parquet, train_batch_size: 1024, max_prompt_length: 512, max_response_length: 512}
"""
ARRAYS = """#!/usr/bin/env bash
set -xeuo pipefail
here=$(dirname "$0")
answers=${ANSWERS:-$((2 + 2))}
pip install --no-deps something
if [ ! -d "$here/data" ]; then files="$HOME/train.parquet"; else files=none; fi
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files="['$files']" data.train_batch_size=256 \\
    actor_rollout_ref.rollout.n=$answers trainer.total_training_steps=3 "${ACTOR[@]}" "$@" 2>&1 | tee out.log
"""
TORCHRUN = """
torchrun --nnodes=2 --nproc_per_node 4 -m verl.trainer.main_ppo --config-name=ppo_trainer algorithm.adv_estimator=grpo
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with two scripts and one that starts no job."""
    config = tmp_path / "verl" / "verl" / "trainer" / "config"
    config.mkdir(parents=True)
    (config / "ppo_trainer.yaml").write_text(CONFIG)
    examples = tmp_path / "verl" / "examples"
    examples.mkdir()
    for name, text in (("arrays", ARRAYS), ("nothing", "echo 1 > left.txt"), ("torchrun", TORCHRUN)):
        (examples / f"{name}.sh").write_text(text)
    return tmp_path / "verl"


def test_scripts_become_the_jobs_that_they_start(checkout: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "recording").mkdir()
    file = job_file(checkout / "examples" / "arrays.sh", checkout, folder)
    assert file is not None
    job = OmegaConf.load(file)
    assert job.data.train_files == [f"{folder}/train.parquet"]
    assert (job.actor_rollout_ref.rollout.n, job.actor_rollout_ref.actor.policy_loss.loss_mode) == (4, "gspo")
    # What a script writes stays out of the checkout.
    assert sorted(path.name for path in checkout.iterdir()) == ["examples", "verl"]


def test_verdicts_of_a_checkout_are_those_of_its_jobs(checkout: Path) -> None:
    kinds = {verdict.file: verdict.kind for verdict in verdicts("verl", checkout)}
    assert kinds == {
        "examples/arrays.sh": "valid",
        "examples/nothing.sh": "refused",
        "examples/torchrun.sh": "valid",
        "verl/trainer/config/ppo_trainer.yaml": "valid",
    }
