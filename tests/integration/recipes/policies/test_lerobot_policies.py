"""lerobot's policies in an interpreter with lerobot, which `RLINF_TEST_LEROBOT` names; without one this is skipped.

python3.12 -m venv V && V/bin/pip install lerobot pytest && V/bin/pip install -e '.[train,demonstrations,mujoco]'
RLINF_TEST_LEROBOT=V/bin/python pytest -m nightly tests/integration/recipes/policies/test_lerobot_policies.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("RLINF_TEST_LEROBOT", "")
ROOT = Path(__file__).parents[4]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot"),
    pytest.mark.timeout(900),
]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
JOB = """
recipe: {recipe}
cluster: {{num_nodes: 1, component_placement: {{"actor,rollout,env": {{node_group: node, placement: 0}}}}}}
env: {{train: {{env_type: franka_mujoco, task: reach, max_episode_steps: 16{more}}}, eval: {{total_num_envs: 8}}}}
actor:
  global_batch_size: 16
  model:
    model_type: lerobot
    num_action_chunks: 4
    options: {{type: {kind}, action_horizon: 8, config: {config}}}
runner: {{max_steps: 2, val_check_interval: 2, save_interval: 2}}
"""
ACT = "{dim_model: 32, n_heads: 2, dim_feedforward: 64, n_encoder_layers: 1, use_vae: false}"
DIFFUSION = "{n_obs_steps: 2, down_dims: [16, 32], n_groups: 4, num_train_timesteps: 5}"
DATA = "data: {train_data_paths: ../demonstrations, batches_per_step: 4}\n"
ROLLOUTS = ", total_num_envs: 8, max_steps_per_rollout_epoch: 16"


def rlinf(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [PYTHON, "-m", "rlinf_cli", *arguments], env=ENVIRONMENT, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_folder_chunk_and_loss_equal_lerobots_own(tmp_path: Path) -> None:
    program = Path(__file__).with_name("lerobot_checks.py")
    done = subprocess.run([PYTHON, str(program), str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_jobs_learn_from_demonstrations_and_rewards(tmp_path: Path) -> None:
    rlinf(tmp_path, "record", "franka_pick", "-o", "demonstrations", "-n", "4", "env.train.task=reach")
    for recipe, kind, config in (("sft", "diffusion", DIFFUSION), ("embodied", "act", ACT)):
        folder = tmp_path / f"{recipe}_{kind}"
        folder.mkdir()
        job = JOB.format(recipe=recipe, kind=kind, config=config, more=ROLLOUTS if recipe == "embodied" else "")
        (folder / "job.yaml").write_text(job + (DATA if recipe == "sft" else ""))
        rlinf(folder, "train", "job.yaml")
        (metrics,) = folder.glob("runs/*/metrics.jsonl")
        last = json.loads(metrics.read_text().splitlines()[-1])
        assert last["step"] == 2
        rlinf(folder, "export", str(metrics.parent), "-o", "exported")
        assert (folder / "exported" / "policy_preprocessor.json").is_file()
