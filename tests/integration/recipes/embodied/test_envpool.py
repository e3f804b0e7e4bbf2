"""EnvPool by its adapter, in the interpreter that `RLINF_ENVPOOL_PYTHON` names: one with `rlinf-cli[envpool]`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

CONTRACT = """
import sys
from recipes.embodied.envs.contract import check_env
from recipes.embodied.envs.registry import make_env
options = {"partially_observable": False} if "MetaWorld" in sys.argv[1] else {}
check_env(lambda settings: make_env("envpool", settings), task=sys.argv[1], options=options)
"""
# From each state of EnvPool's, Gymnasium's CartPole takes the same step. Prints the ends, and the largest difference.
TWINS = """
import gymnasium
import numpy as np
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env

env = make_env("envpool", EnvSettings(num_envs=4, task="CartPole-v1", seed=3))
states = env.reset()["states"]
twins = [gymnasium.make("CartPole-v1").unwrapped for _ in states]
random, ends, worst = np.random.default_rng(0), 0, 0.0
for _ in range(600):
    for twin, state in zip(twins, states):
        twin.reset()
        twin.state = state.astype(np.float64)
    actions = random.integers(0, 2, (4, 1, 1))
    result = env.step(actions)
    last = result.observations if result.final_observations is None else result.final_observations
    for row, twin in enumerate(twins):
        seen, reward, terminated, _, _ = twin.step(int(actions[row, 0, 0]))
        worst = max(worst, float(np.abs(seen - last["states"][row]).max()))
        assert (reward, terminated) == (result.rewards[row, 0], result.terminations[row, 0])
        ends += terminated
    states = result.observations["states"]
print(ends, worst)
"""


@pytest.fixture
def python() -> str:
    named = os.environ.get("RLINF_ENVPOOL_PYTHON")
    if not named:
        pytest.skip("RLINF_ENVPOOL_PYTHON names no interpreter with envpool")
    return named


def printed(python: str, code: str, *words: str) -> str:
    ended = subprocess.run([python, "-P", "-c", code, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize("task", ["CartPole-v1", "MetaWorld/Reach-v3", "HalfCheetah-v5", "FetchReachDense-v4"])
def test_the_promises_of_environments_are_kept(python: str, task: str) -> None:
    assert printed(python, CONTRACT, task) == ""


def test_steps_and_ends_are_those_of_gymnasium(python: str) -> None:
    ends, worst = printed(python, TWINS).split()
    assert int(ends) > 50
    assert float(worst) < 1e-6


@pytest.mark.ray
def test_it_trains_on_meta_world(python: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        f"""recipe: embodied
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: {{node_group: node, placement: 0}}
    env: {{node_group: pool, placement: 0}}
  node_groups:
    - label: pool
      node_ranks: 0
      env_configs: [{{node_ranks: 0, python_interpreter_path: {python}}}]
env:
  train:
    env_type: envpool
    task: MetaWorld/Reach-v3
    options: {{partially_observable: false}}
    total_num_envs: 4
    max_episode_steps: 8
    max_steps_per_rollout_epoch: 16
actor: {{global_batch_size: 16}}
runner: {{max_steps: 2, logger: {{log_path: runs, experiment_name: run}}}}
"""
    )
    command = [sys.executable, "-m", "rlinf_cli", "train", str(file)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
