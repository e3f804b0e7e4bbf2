"""The embodied recipe on workers: it trains, keeps what it promises, and repeats itself."""

from __future__ import annotations

import pytest
import torch

from rlinf_core.runners.events import CheckpointSaved, Evaluated, RunFinished, RunStarted, StepFinished
from tests.integration.recipes.conftest import SPANNING, Run, Train

# Every run launches workers anew, on a machine that may be slow.
pytestmark = pytest.mark.timeout(600)

NAMES = {
    "env/return",
    "env/episode_len",
    "env/success_once",
    "env/success_at_end",
    "train/actor/policy_loss",
    "train/actor/approx_kl",
    "train/actor/clip_fraction",
    "train/actor/grad_norm",
    "train/actor/lr",
    "train/actor/entropy",
    "env/steps",
    "speed/env_steps_per_second",
    "speed/samples_per_second",
    "memory/actor_gib",
    "train/critic/value_loss",
    "train/critic/explained_variance",
    "time/step",
    "time/sync_weights",
    "time/generate_rollouts",
    "time/cal_adv_and_returns",
    "time/actor_training",
    "rollout/reward",
    "rollout/advantages_mean",
}


def learned(run: Run) -> list[dict[str, float]]:
    """Return what does not depend on the clock and the machine, step by step."""
    return [
        {name: value for name, value in record.metrics.items() if not name.startswith(("time/", "speed/", "memory/"))}
        for record in run.metrics
    ]


def same_weights(one: Run, other: Run) -> bool:
    mine, theirs = one.weights(), other.weights()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_tells_and_keeps_what_it_promises(train: Train) -> None:
    run = train("runner.val_check_interval=2", "runner.save_interval=2")
    started, finished = run.of(RunStarted)[0], run.of(RunFinished)[0]
    assert (started.first_step, started.last_step, started.components) == (1, 3, {"actor": 1, "rollout": 1, "env": 1})
    assert [item.step for item in run.of(StepFinished)] == [1, 2, 3]
    assert [item.step for item in run.of(Evaluated)] == [0, 2, 3]
    assert [item.step for item in run.of(CheckpointSaved)] == [2, 3]
    assert [record.step for record in run.metrics] == [1, 2, 3]
    assert run.metrics[0].metrics.keys() >= NAMES
    assert {"eval/return", "eval/success_at_end"} <= finished.metrics.keys()
    assert finished.step == 3
    assert 0 < run.metrics[0].metrics["env/episode_len"] <= 10
    assert {(record.metrics["rollout/staleness"]) for record in run.metrics} == {0}


@pytest.mark.nightly
def test_a_run_repeats_itself_and_its_halves_make_the_whole(train: Train) -> None:
    whole = train("runner.max_steps=4", "runner.logger.experiment_name=whole")
    half = train("runner.max_steps=2", "runner.logger.experiment_name=halves")
    rest = train("runner.max_steps=4", "runner.logger.experiment_name=halves", "runner.resume_dir=auto")
    assert rest.folder.path == half.folder.path
    assert rest.of(RunStarted)[0].first_step == 3
    assert same_weights(whole, rest)
    assert learned(rest) == learned(whole)


@pytest.mark.nightly
def test_run_resumed_within_episodes_equals_the_whole_run(train: Train, spanning: Run) -> None:
    (middle,) = [item.path for item in spanning.folder.checkpoints.complete() if item.step == 3]
    rest = train(*SPANNING, "runner.max_steps=5", f"runner.resume_dir={middle}")
    assert rest.of(RunStarted)[0].first_step == 4
    assert same_weights(spanning, rest)
    assert learned(rest)[-2:] == learned(spanning)[-2:]
    lengths = [record.metrics["env/episode_len"] for record in spanning.metrics if "env/episode_len" in record.metrics]
    assert max(lengths) > 10, "no episode was longer than a pass"


@pytest.mark.nightly
def test_resumed_run_equals_the_whole_across_passes(train: Train) -> None:
    """The run is cut in the middle of episodes, which the second half continues."""
    overrides = (
        "env.train.env_type=gymnasium",
        "env.train.task=CartPole-v1",
        "env.train.max_episode_steps=null",
        "env.train.rollout_epoch=2",
    )
    whole = train(*overrides, "runner.max_steps=6", "runner.logger.experiment_name=whole")
    half = train(*overrides, "runner.max_steps=4", "runner.logger.experiment_name=halves")
    rest = train(*overrides, "runner.max_steps=6", "runner.logger.experiment_name=halves", "runner.resume_dir=auto")
    assert rest.folder.path == half.folder.path
    assert rest.of(RunStarted)[0].first_step == 5
    assert same_weights(whole, rest)
    assert learned(rest) == learned(whole)
    lengths = [record.metrics["env/episode_len"] for record in whole.metrics if "env/episode_len" in record.metrics]
    assert max(lengths) > 10, "no episode was longer than a pass"


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "env.train.rollout_epoch=2",
            "env.train.auto_reset=false",
            "actor.micro_batch_size=20",
            "actor.enable_offload=true",
            "rollout.enable_offload=true",
            "actor.model.num_action_chunks=2",
            "algorithm.entropy_bonus=0.01",
            "algorithm.normalize_rewards=true",
            "runner.max_steps=2",
        ),
        (
            "env.train.env_type=gymnasium",
            "env.train.task=CartPole-v1",
            "env.train.max_episode_steps=20",
            "actor.model.precision=bf16",
            "runner.max_steps=2",
        ),
        *(
            pytest.param(
                (
                    "env.train.env_type=franka_vision",
                    "env.train.task=touch",
                    f"actor.model.model_type={model_type}",
                    "actor.model.hidden_dim=32",
                    "actor.model.num_action_chunks=2",
                    "actor.model.precision=bf16",
                    "actor.model.options={num_layers: 1, max_prompt_tokens: 32, temperature: 1.6}",
                    "algorithm.logprob_type=token_level",
                    "runner.max_steps=2",
                ),
                marks=pytest.mark.nightly,
            )
            for model_type in ("openvla", "openvla_oft")
        ),
        pytest.param(
            (
                "actor.model.model_type=flow_policy",
                "actor.model.num_action_chunks=2",
                "actor.model.options={action_horizon: 4}",
                "algorithm.logprob_type=token_level",
                "env.eval.inference.chunking=ensemble",
                "runner.val_check_interval=1",
                "runner.max_steps=2",
            ),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["passes", "gymnasium", "openvla", "openvla_oft", "ensemble"],
)
def test_every_mode_trains(train: Train, overrides: tuple[str, ...]) -> None:
    """Two stages are those of `spanning`, and GRPO is learned by in `test_embodied_learns`."""
    run = train(*overrides)
    metrics = run.metrics
    assert [record.step for record in metrics] == [1, 2]
    assert all(value == value for record in metrics for value in record.metrics.values())
    assert metrics[-1].metrics["train/actor/grad_norm"] > 0


def test_rollouts_run_ahead_by_as_many_versions_as_allowed(train: Train) -> None:
    run = train("runner.max_staleness=2", "runner.max_steps=4", "runner.val_check_interval=2")
    assert [record.metrics["rollout/staleness"] for record in run.metrics] == [0, 1, 2, 2]
    assert [item.step for item in run.of(Evaluated)] == [0, 2, 4]


@pytest.mark.nightly
def test_evaluating_alone_trains_nothing(train: Train) -> None:
    trained = train("runner.max_steps=1", "runner.logger.experiment_name=one", "runner.val_check_interval=1")
    run = train("runner.only_eval=true", "runner.logger.experiment_name=one", "runner.resume_dir=auto")
    assert not run.of(StepFinished)
    (evaluated,) = run.of(Evaluated)
    assert evaluated.metrics["eval/return"] == trained.of(Evaluated)[-1].metrics["eval/return"]
