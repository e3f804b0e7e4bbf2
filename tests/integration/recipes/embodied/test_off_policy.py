"""SAC from a replay buffer; real simulators and EnvPool, each in an interpreter of its own, by a command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.embodied.interpreters.locked_venvs import Made, lines_of, probe
from recipes.embodied.off_policy.segments import read_segments
from rlinf_core.runners.events import ACTOR_TRAINING
from tests.integration.recipes.conftest import Killer, Run, Train
from tests.rlinf_command import last_metrics, output_of, rlinf

pytestmark = pytest.mark.timeout(600)

# 80 steps of environments in a training step; episodes of 15 steps span passes of 10.
SAC = (
    "actor.model.model_type=squashed_policy",
    "algorithm.loss_type=sac",
    *(
        "algorithm.learning_starts=100",
        "algorithm.random_steps=80",
        "algorithm.update_to_data=0.1",
        "algorithm.n_steps=3",
    ),
    "algorithm.replay.capacity=400",
    "env.train.max_episode_steps=15",
    "runner.max_steps=4",
)


# The expert takes over every now and then.
HELPED = ("env.train.intervention={source: scripted, options: {probability: 0.1, shortest: 2, longest: 5}}",)


def learned(run: Run) -> list[dict[str, float]]:
    """Return the metrics of all steps that do not depend on the machine."""
    kinds = ("env/", "train/", "replay/", "rollout/")
    return [{name: value for name, value in record.metrics.items() if name.startswith(kinds)} for record in run.metrics]


@pytest.mark.nightly
def test_resumed_run_equals_the_whole_with_interventions(train: Train) -> None:
    whole = train(*SAC, *HELPED)
    first = train(*SAC, *HELPED, "runner.max_steps=2")
    (half,) = [item.path for item in first.folder.checkpoints.complete() if item.step == 2]
    second = train(*SAC, *HELPED, f"runner.resume_dir={half}")
    # Nothing is learned before 100 steps, and then a tenth of an update for each step: 6, 14, 22 updates in all.
    assert [batch["train/updates"] for batch in learned(whole)] == [0, 6, 14, 22]
    assert [batch["replay/online"] for batch in learned(whole)] == [80, 160, 240, 320]
    assert learned(second)[-2:] == learned(whole)[-2:]
    helped = [batch["env/intervened"] for batch in learned(whole)]
    assert [batch["replay/interventions"] for batch in learned(whole)] == [
        round(80 * sum(helped[: n + 1])) for n in range(4)
    ]
    assert 0 < sum(helped) < 4
    assert second.ends_like(whole)


@pytest.mark.nightly
def test_killed_actor_resumes_with_equal_samples(train: Train) -> None:
    seen = ("env.train.env_type=franka_vision", "env.train.max_steps_per_rollout_epoch=5", "env.train.task=touch")
    sizes = ("algorithm.learning_starts=40", "algorithm.replay.capacity=120")
    whole = train(*SAC, *seen, *sizes)
    rows = train.folder / "rows"
    killer = Killer("actor", 4, ACTOR_TRAINING)
    stored = train(*SAC, *seen, *sizes, f"algorithm.replay.storage={rows}", "runner.save_interval=2", during=killer)
    assert not killer.left
    # The ring has gone round by then: 160 steps in 120 rows.
    names = {name for name in learned(whole)[-1] if not name.startswith("replay/")}
    ours, theirs = ({name: learned(run)[-1][name] for name in names} for run in (stored, whole))
    assert ours == theirs
    assert learned(stored)[-1]["replay/gib"] < 0.0001 < learned(whole)[-1]["replay/gib"]
    assert learned(stored)[-1]["replay/stored_gib"] > 0
    assert not list(rows.iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.loss_type=td3", "actor.model.options.exploration_noise=0.1"),
        ("algorithm.critics=5", "algorithm.critic_norm=layer"),
        ("algorithm.critic_norm=batch",),
        ("runner.max_staleness=1",),
        (
            "cluster.component_placement={'actor,rollout,env': {node_group: node, placement: '0:0-1'}}",
            "actor.fsdp_config.sharding_strategy=no_shard",
        ),
        (
            "cluster.component_placement={'actor,rollout,env': {node_group: node, placement: '0:0-1'}}",
            "actor.fsdp_config.sharding_strategy=no_shard",
            "algorithm.normalize_observations=true",
        ),
    ],
    ids=["td3", "rlpd", "crossq", "ahead", "two of each", "two that normalize"],
)
def test_every_method_and_mode_trains(train: Train, overrides: tuple[str, ...]) -> None:
    run = train(*SAC, *overrides)
    assert learned(run)[-1]["train/updates"] == 22
    shares = [record.metrics[name] for record in run.metrics for name in ("speed/learner_idle", "speed/env_idle")]
    assert all(0 <= share <= 1 for share in shares)
    assert all(torch.isfinite(weight).all() for weight in run.weights().values())


@pytest.mark.nightly
def test_what_is_recorded_is_there_for_the_next_run(train: Train) -> None:
    folder = train.folder / "steps"
    recording = (*SAC, *HELPED, f"algorithm.replay.recording_path={folder}")
    train(*recording, "runner.max_steps=2")
    parts = list(read_segments(folder / "0"))
    assert sum(int(part["valid"].sum()) for part in parts) == 160
    helped = sum(int(part["interventions"].sum()) for part in parts)
    assert 0 < helped < 160
    run = train(*recording, "runner.max_steps=1")
    assert learned(run)[0]["replay/online"] == 240
    assert learned(run)[0]["replay/interventions"] == helped + round(80 * learned(run)[0]["env/intervened"])


TASKS = {
    "libero": "libero_spatial/0",
    "metaworld": "reach-v3",
    "robosuite": "Lift",
    "gymnasium_robotics": "FetchReachDense-v4",
    "gym_hil": "gym_hil/PandaPickCube-v0",
}
# Run in the simulator's interpreter: the promises of an environment, on few steps, and the sizes of what is observed.
CONTRACT = """
import json, sys
from recipes.embodied.envs.registry import check_env
from recipes.embodied.envs.registry import make_env
check_env(lambda settings: make_env(sys.argv[1], settings), task=sys.argv[2], options=json.loads(sys.argv[3]))
assert sys.argv[1] == "envpool" or "torch" not in sys.modules
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


def printed(env_type: str, code: str, *words: str) -> str:
    return output_of(python_of(env_type), "-P", "-c", code, *words)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("env_type", "task", "options"),
    [
        *((env_type, task, {"cameras": []}) for env_type, task in TASKS.items()),
        ("envpool", "MetaWorld/Reach-v3", {"partially_observable": False}),
        *(("envpool", task, {}) for task in ("CartPole-v1", "HalfCheetah-v5", "FetchReachDense-v4")),
    ],
)
def test_the_promises_of_environments_are_kept(env_type: str, task: str, options: dict[str, Any]) -> None:
    assert printed(env_type, CONTRACT, env_type, task, json.dumps(options)) == "" or env_type != "envpool"


def job_of(folder: Path, made: Made) -> Path:
    """Write a job whose environments step in an interpreter of their own."""
    lines = lines_of(made).replace("cluster:\n", "cluster:\n  num_nodes: 1\n")
    lines = lines.replace(
        "component_placement:\n", "component_placement:\n    actor,rollout: {node_group: node, placement: 0}\n"
    )
    file = folder / "job.yaml"
    file.write_text(f"recipe: embodied\n{lines}\nrunner: {{max_steps: 2, logger: {{log_path: runs}}}}\n")
    return file


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.ray
@pytest.mark.parametrize("env_type", TASKS)
def test_it_trains_apart_from_the_actor(env_type: str, tmp_path: Path) -> None:
    python = python_of(env_type)
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
    )
    rlinf(tmp_path, "train", str(job_of(tmp_path, Made(env_type, python, {}, renderer_of(env_type, python)))), *options)
    last = last_metrics(tmp_path)
    assert last["step"] == 2
    assert last["metrics"]["env/episodes"] == 2


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


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_steps_and_ends_are_those_of_gymnasium() -> None:
    ends, worst = printed("envpool", TWINS).split()
    assert int(ends) > 50
    assert float(worst) < 1e-6


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.ray
def test_it_trains_on_meta_world(tmp_path: Path) -> None:
    options = (
        *("env.train.task=MetaWorld/Reach-v3", "env.train.options={partially_observable: false}"),
        *("env.train.total_num_envs=4", "env.train.max_episode_steps=8", "env.train.max_steps_per_rollout_epoch=16"),
        "actor.global_batch_size=16",
    )
    rlinf(tmp_path, "train", str(job_of(tmp_path, Made("envpool", python_of("envpool"), {}, None))), *options)
    # Of two steps, by episodes that ended within them.
    metrics = last_metrics(tmp_path)
    assert metrics["step"] == 2
    assert metrics["metrics"]["env/episode_len"] == 8
