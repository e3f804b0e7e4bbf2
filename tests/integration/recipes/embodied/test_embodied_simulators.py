"""Real simulators, each in an interpreter of its own, by the command that people type.

`RLINF_LIBERO_PYTHON`, `RLINF_METAWORLD_PYTHON`, `RLINF_ROBOSUITE_PYTHON` and `RLINF_GYMNASIUM_ROBOTICS_PYTHON` name the
interpreters: `rlinf venv setup` makes them, see docs/environments.md. `RLINF_GYM_HIL_PYTHON` names one with gym-hil.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.embodied.interpreters.locked_venvs import Made, lines_of, probe

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]

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


@pytest.mark.parametrize("env_type", TASKS)
def test_the_promises_of_environments_are_kept(env_type: str) -> None:
    command = [str(python_of(env_type)), "-P", "-c", CONTRACT, env_type, TASKS[env_type]]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


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
    command = [sys.executable, "-m", "rlinf_cli", "train", str(file), *options]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["step"] == 2
    assert last["metrics"]["env/episodes"] == 2
