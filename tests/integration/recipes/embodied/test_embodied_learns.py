"""That the recipe learns, through its workers: a policy that never solves its task comes to do so nearly always."""

from __future__ import annotations

import pytest

from rlinf_core.runners.events import Evaluated
from tests.integration.recipes.conftest import Run, Train


def greedy_success(run: Run) -> float:
    """Of the evaluation at the end, in episodes that training has not seen."""
    return run.of(Evaluated)[-1].metrics["eval/success_at_end"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shipped", "steps"),
    [("laptop", 12), pytest.param("laptop_grpo", 20, marks=pytest.mark.nightly)],
    ids=["ppo", "grpo"],
)
def test_reaching_is_learned_in_seconds(train: Train, shipped: str, steps: int) -> None:
    short = (f"runner.max_steps={steps}", f"runner.val_check_interval={steps}", "runner.save_interval=-1")
    run = train("env.train.task=reach", "env.eval.total_num_envs=256", *short, shipped=shipped)
    assert run.metrics[0].metrics["env/success_once"] < 0.3
    assert greedy_success(run) >= 0.9


def shipped_run(train: Train, shipped: str, seed: int) -> Run:
    """As the file says, to its last step. In the beginning it cannot do it."""
    seeds = (f"env.train.seed={seed}", f"actor.seed={seed}")
    run = train(*seeds, "env.eval.total_num_envs=256", "runner.save_interval=-1", shipped=shipped)
    assert run.metrics[0].metrics["env/success_at_end"] < 0.1
    return run


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_to_pick(train: Train, seed: int) -> None:
    assert greedy_success(shipped_run(train, "laptop", seed)) >= 0.9


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_learns_to_pick(train: Train, seed: int) -> None:
    """The policy that acts goes on succeeding; what it does greedily got there too, and wavers afterwards.

    Close to perfect, a step learns from one failure or two, and nothing else says where the greedy action should be.
    """
    run = shipped_run(train, "laptop_grpo", seed)
    sampled = [record.metrics["env/success_at_end"] for record in run.metrics[-10:]]
    assert sum(sampled) / len(sampled) >= 0.9
    assert max(item.metrics["eval/success_at_end"] for item in run.of(Evaluated)) >= 0.9


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_picking_is_learned_from_samples_of_older_weights(train: Train) -> None:
    run = train("runner.max_staleness=1", "env.eval.total_num_envs=256", "runner.save_interval=-1", shipped="laptop")
    assert greedy_success(run) >= 0.9
    assert [record.metrics["rollout/staleness"] for record in run.metrics] == [0.0, *[1.0] * (len(run.metrics) - 1)]
