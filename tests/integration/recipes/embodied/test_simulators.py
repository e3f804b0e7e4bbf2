"""Real simulators and EnvPool, each in an interpreter of its own, by the command that people type."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from recipes.embodied.interpreters.locked_venvs import Made, lines_of, probe
from tests.rlinf_command import last_metrics, rlinf

TASKS = {
    "libero": "libero_spatial/0",
    "metaworld": "reach-v3",
    "robosuite": "Lift",
    "gymnasium_robotics": "FetchReachDense-v4",
    "gym_hil": "gym_hil/PandaPickCube-v0",
}
# Run in the simulator's interpreter: the promises of an environment, on few steps, and the sizes of what is observed.
CONTRACT = """
import sys
from recipes.embodied.envs.contract import check_env
from recipes.embodied.envs.registry import make_env
check_env(lambda settings: make_env(sys.argv[1], settings), task=sys.argv[2], options={"cameras": []})
assert "torch" not in sys.modules
"""


def python_of(env_type: str) -> Path:
    name = f"RLINF_{env_type.upper()}_PYTHON"
    if not os.environ.get(name):
        pytest.skip(f"{name} names no interpreter with {env_type}")
    return Path(os.environ[name])


def renderer_of(env_type: str, python: Path) -> str:
    for renderer in ("egl", "osmesa"):
        probed = probe(env_type, python, {"MUJOCO_GL": renderer})
        assert "fault" not in probed, probed
        if "frame" in probed:
            return renderer
    raise AssertionError(f"no image: {probed}")


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("env_type", TASKS)
def test_the_promises_of_environments_are_kept(env_type: str) -> None:
    command = [str(python_of(env_type)), "-P", "-c", CONTRACT, env_type, TASKS[env_type]]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.ray
@pytest.mark.parametrize("env_type", TASKS)
def test_it_trains_apart_from_the_actor(env_type: str, tmp_path: Path) -> None:
    python = python_of(env_type)
    made = Made(env_type, python, {}, renderer_of(env_type, python))
    lines = lines_of(made).replace("cluster:\n", "cluster:\n  num_nodes: 1\n")
    lines = lines.replace(
        "component_placement:\n", "component_placement:\n    actor,rollout: {node_group: node, placement: 0}\n"
    )
    file = tmp_path / "job.yaml"
    file.write_text(f"recipe: embodied\n{lines}\n")
    options = (
        f"env.train.task={TASKS[env_type]}",
        "env.train.total_num_envs=2",
        "env.train.num_processes=2",
        "env.train.max_episode_steps=8",
        "env.train.max_steps_per_rollout_epoch=8",
        "env.train.options={cameras: [main], image_size: 48}",
        "actor.model.model_type=cnn_policy",
        "actor.model.num_action_chunks=2",
        "actor.global_batch_size=8",
        "runner.max_steps=2",
        "runner.logger.log_path=runs",
        "runner.logger.experiment_name=run",
    )
    rlinf(tmp_path, "train", str(file), *options)
    last = last_metrics(tmp_path)
    assert last["step"] == 2
    assert last["metrics"]["env/episodes"] == 2


CONTRACT_OF_ENVPOOL = """
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


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("task", ["CartPole-v1", "MetaWorld/Reach-v3", "HalfCheetah-v5", "FetchReachDense-v4"])
def test_envpool_keeps_the_promises_of_environments(python: str, task: str) -> None:
    assert printed(python, CONTRACT_OF_ENVPOOL, task) == ""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_steps_and_ends_are_those_of_gymnasium(python: str) -> None:
    ends, worst = printed(python, TWINS).split()
    assert int(ends) > 50
    assert float(worst) < 1e-6


@pytest.mark.nightly
@pytest.mark.timeout(1200)
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
    rlinf(tmp_path, "train", str(file))
    # Of two steps, by episodes that ended within them.
    metrics = last_metrics(tmp_path)
    assert metrics["step"] == 2
    assert metrics["metrics"]["env/episode_len"] == 8
