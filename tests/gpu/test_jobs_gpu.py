"""Whole jobs on one GPU, of each recipe that trains a policy: a few steps through the command, by Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

ROOT = Path(__file__).parents[2]
ACTING = "cluster.component_placement={actor: 0, rollout: 0, env: {node_group: node, placement: 0}}"
ANSWERING = "cluster.component_placement={actor: 0, rollout: 0, critic: 0, reward: {node_group: node, placement: 0}}"
OFFLOADS = ("actor.enable_offload=true", "rollout.enable_offload=true")
SOFT = (
    *("actor.model.model_type=squashed_policy", "actor.global_batch_size=64"),
    *("algorithm.loss_type=sac", "algorithm.learning_starts=200", "algorithm.update_to_data=0.1"),
    *("algorithm.options.value_clip=null", "env.train.total_num_envs=16"),
)
STEADY = ("algorithm.normalize_observations=true", "algorithm.target_kl=0.5", "actor.model.precision=bf16")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        ("embodied/pick-laptop", ACTING, *OFFLOADS),
        ("embodied/pick-laptop", ACTING, *STEADY),
        ("embodied/pick-laptop", ACTING, *SOFT),
        ("embodied/pick-grpo-laptop", ACTING, "runner.save_interval=2"),
        ("embodied/franka-vla-laptop", ACTING),
        ("embodied/franka-pi05-laptop", ACTING),
        ("math/sums-ppo-laptop", ANSWERING, "actor.warm_start.steps=2"),
        ("sft/sums-chat-laptop", "cluster.component_placement={actor: 0}"),
    ],
    ids=lambda words: words[0],
)
def test_a_job_trains_on_a_gpu(tmp_path: Path, words: tuple[str, ...]) -> None:
    name, *overrides = words
    command = [sys.executable, "-m", "rlinf_cli", "train", name, *overrides, "runner.max_steps=2"]
    environment = {**os.environ, "RLINF_ADDRESS": "local", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(
        [*command, "runner.val_check_interval=2", f"runner.logger.log_path={tmp_path}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "step 2/2" in run.stderr + run.stdout
