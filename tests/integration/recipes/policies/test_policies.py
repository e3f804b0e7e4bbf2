"""Policies of others by one contract: LeRobot's, SmolVLA, and those of ours."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.rlinf_command import last_metrics, output_of, rlinf

PYTHON = os.environ.get("RLINF_TEST_LEROBOT", "")
ROOT = Path(__file__).parents[4]
PROGRAMS = Path(__file__).with_name("policy_contract")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
COLUMNS = ("names", "picture", "chunk", "loss", "reload", "repeat")
# What needs lerobot here, too; the others run with the transformers that this program asks for.
NEED_LEROBOT = (
    *("act", "diffusion", "vqbet", "multi_task_dit", "xvla", "smolvla"),
    *("diffusion_2_obs", "vqbet_5_obs", "multi_task_dit_2_obs"),
)


def rows_of_docs() -> dict[str, list[str]]:
    """Return the verdicts in the docs, by policy."""
    text = (ROOT / "docs" / "dev" / "policies.md").read_text()
    table = text.partition("## Held against the originals")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def run(python: str, program: str, *arguments: str) -> str:
    return output_of(python, PROGRAMS / program, *arguments, env=ENVIRONMENT)


def held(python: str, program: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """Return the checks of a program that held; it asserts them itself, and a failed one fails here with its words."""
    printed = output_of(python, Path(__file__).with_name(program), folder, env=environment)
    return [line.removeprefix("held ") for line in printed.splitlines() if line.startswith("held ")]


def test_the_docs_have_a_row_for_each_policy_held() -> None:
    text = (PROGRAMS / "record.py").read_text()
    recorded = [line.split('"')[1] for line in text.splitlines() if line.startswith('    "')]
    assert list(rows_of_docs()) == recorded


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", list(rows_of_docs()))
def test_a_policy_equals_its_original(policy: str, tmp_path: Path) -> None:
    run(PYTHON, "record.py", str(tmp_path), policy)
    printed = run(PYTHON if policy in NEED_LEROBOT else sys.executable, "contract.py", str(tmp_path), policy)
    verdicts = json.loads(printed.splitlines()[-1])[policy]
    assert [verdicts[column] for column in COLUMNS] == rows_of_docs()[policy]


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


with_lerobot = partial(rlinf, python=PYTHON, env=ENVIRONMENT)


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot")
@pytest.mark.timeout(900)
def test_folder_chunk_and_loss_equal_lerobots_own(tmp_path: Path) -> None:
    checks = held(PYTHON, "lerobot_checks.py", tmp_path, ENVIRONMENT)
    assert checks == ["act", "diffusion", "vqbet", "density", "ensemble", "steering", "windows", "refusals"]


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="RLINF_TEST_LEROBOT names no interpreter with lerobot")
@pytest.mark.timeout(900)
def test_jobs_learn_from_demonstrations_and_rewards(tmp_path: Path) -> None:
    with_lerobot(
        tmp_path, "record", "embodied/franka-pick-laptop", "-o", "demonstrations", "-n", "4", "env.train.task=reach"
    )
    for recipe, kind, config in (("sft", "diffusion", DIFFUSION), ("embodied", "act", ACT)):
        folder = tmp_path / f"{recipe}_{kind}"
        folder.mkdir()
        job = JOB.format(recipe=recipe, kind=kind, config=config, more=ROLLOUTS if recipe == "embodied" else "")
        (folder / "job.yaml").write_text(job + (DATA if recipe == "sft" else ""))
        with_lerobot(folder, "train", "job.yaml")
        assert last_metrics(folder)["step"] == 2
        with_lerobot(folder, "export", str(*folder.glob("runs/*")), "-o", "exported")
        assert (folder / "exported" / "policy_preprocessor.json").is_file()


LEROBOT_PYTHON = os.environ.get("RLINF_TEST_SMOLVLA", "")
LEROBOT_ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SMOLVLA_JOB = """
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


@pytest.mark.nightly
@pytest.mark.skipif(not LEROBOT_PYTHON, reason="RLINF_TEST_SMOLVLA names no interpreter with lerobot")
@pytest.mark.timeout(600)
def test_it_acts_learns_and_is_loaded(tmp_path: Path) -> None:
    checks = held(LEROBOT_PYTHON, "smolvla_checks.py", tmp_path, LEROBOT_ENVIRONMENT)
    assert checks == ["acting", "training", "folders"]


@pytest.mark.nightly
@pytest.mark.skipif(not LEROBOT_PYTHON, reason="RLINF_TEST_SMOLVLA names no interpreter with lerobot")
@pytest.mark.timeout(600)
def test_a_job_learns_from_demonstrations_and_rewards(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(SMOLVLA_JOB.format(python=LEROBOT_PYTHON, data=tmp_path / "demonstrations"))
    rlinf(tmp_path, "record", "embodied/franka-vla-laptop", "-o", "demonstrations", "-n", "8", env=LEROBOT_ENVIRONMENT)
    rlinf(tmp_path, "train", str(job), env=LEROBOT_ENVIRONMENT)
    last = last_metrics(tmp_path)
    assert last["step"] == 2
    assert last["metrics"]["train/actor/bc_loss"] > 0
