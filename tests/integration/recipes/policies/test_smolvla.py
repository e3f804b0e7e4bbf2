"""SmolVLA in an interpreter with lerobot, which `RLINF_TEST_SMOLVLA` names; without one the tests are skipped.

It has lerobot with its extra `smolvla`, of the same Python as rlinf, and this very rlinf. With Python 3.12 pip takes
lerobot 0.6, and the tests run in that interpreter:

    python3.12 -m venv V && V/bin/pip install 'lerobot[smolvla,dataset]' peft pytest pytest-timeout hypothesis
    V/bin/pip install -e '.[train,demonstrations,mujoco]'
    RLINF_TEST_SMOLVLA=V/bin/python V/bin/python -m pytest -m nightly tests/integration/recipes/policies/test_smolvla.py

With 3.11 it takes 0.4.4, and they run in any interpreter of rlinf.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("RLINF_TEST_SMOLVLA", "")
PROGRAM = Path(__file__).with_name("smolvla_checks.py")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_SMOLVLA names no interpreter with lerobot"),
    pytest.mark.timeout(600),
]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
JOB = """
recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {{node_group: lerobot, placement: 0}}
    env: {{node_group: node, placement: 0}}
  node_groups:
    - label: lerobot
      node_ranks: 0
      env_configs: [{{node_ranks: 0, python_interpreter_path: {python}}}]
data: {{train_data_paths: {data}}}
env:
  train:
    {{env_type: franka_vision, task: touch, total_num_envs: 8, max_episode_steps: 8, max_steps_per_rollout_epoch: 8}}
actor:
  global_batch_size: 8
  model: {{model_type: smolvla, hidden_dim: 32, num_action_chunks: 4, options: {{num_layers: 2, max_prompt_tokens: 8}}}}
algorithm: {{update_epoch: 1, bc_weight: 0.5}}
runner: {{max_steps: 2, val_check_interval: 2, save_interval: 2}}
"""


def test_it_acts_learns_and_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run([PYTHON, str(PROGRAM), str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_job_learns_from_demonstrations_and_rewards(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(python=PYTHON, data=tmp_path / "demonstrations"))
    for command in (["record", "franka_vision_ppo", "-o", "demonstrations", "-n", "8"], ["train", str(job)]):
        done = subprocess.run(
            [sys.executable, "-m", "rlinf_cli", *command], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["step"] == 2
    assert last["metrics"]["train/actor/bc_loss"] > 0
