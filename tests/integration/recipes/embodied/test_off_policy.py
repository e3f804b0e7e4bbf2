"""SAC from a replay buffer, and simulators in interpreters of their own."""

from __future__ import annotations

import pytest
import torch

from recipes.embodied.replay.segments import read_segments
from rlinf_core.runners.events import ACTOR_TRAINING
from tests.integration.recipes.conftest import Killer, Run, Train

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
    for name, weight in whole.weights().items():
        assert torch.equal(weight, second.weights()[name]), name


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
