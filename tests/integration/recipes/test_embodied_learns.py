"""That the recipe learns, through its workers: a policy that never solves its task comes to do so nearly always."""

from __future__ import annotations

import pytest

from rlinf_core.runners.events import Evaluated
from tests.integration.recipes.conftest import Train

# The shipped sizes, in the place of those that keep other tests short.
SHIPPED = (
    "env.train.task=pick",
    "env.train.total_num_envs=64",
    "env.train.max_episode_steps=50",
    "env.train.max_steps_per_rollout_epoch=50",
    "env.eval.total_num_envs=256",
    "actor.global_batch_size=800",
    "actor.model.hidden_dim=128",
    "algorithm.update_epoch=6",
    "runner.save_interval=-1",
)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_to_pick(train: Train, seed: int) -> None:
    seeds = (f"env.train.seed={seed}", f"actor.seed={seed}")
    run = train(*SHIPPED, *seeds, "runner.max_steps=150", "runner.val_check_interval=150")
    (final,) = run.of(Evaluated)
    assert final.metrics["eval/success_at_end"] >= 0.9
    # It did not from the beginning.
    assert run.metrics[0].metrics["env/success_at_end"] < 0.1
