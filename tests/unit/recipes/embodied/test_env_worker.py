"""What an env worker tells of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.env_worker import Stages
from rlinf_core.job.load import load_job
from rlinf_core.runners.embodied_runner import Layout

# Four environments: the task of the first ends with its second step, the other episodes are cut off after three.
COUNTING = (
    "env.train.env_type=tests.unit.recipes.embodied.conftest:CountingEnv",
    "env.train.task=null",
    "env.train.options={end: [2, 0, 0, 0]}",
    "env.train.total_num_envs=4",
    "env.train.max_episode_steps=3",
    "env.train.max_steps_per_rollout_epoch=4",
    "actor.global_batch_size=16",
)


def asked(*overrides: str, training: bool = True) -> list[bool]:
    """After which of three steps a value is asked for the observations in which episodes ended."""
    job = load_job("laptop", (*COUNTING, *overrides), environ={})
    job.raise_if_bad()
    config = cast("EmbodiedConfig", job.config)
    worker: Any = SimpleNamespace(worker_info=SimpleNamespace(rank=0, hardware=()))
    environments = config.env.train if training else config.env.eval
    stages = Stages(config, environments, worker, Layout(1, 1, 1, "trajectories"), training=training)
    (batch,) = stages.batches
    batch.reset()
    messages = [stages.message(batch.step(np.zeros((4, 1, 1), np.float32))) for _ in range(3)]
    return ["final_observations" in message for message in messages]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), [False, False, True]),
        (("algorithm.bootstrap_type=always",), [False, True, True]),
        (
            ("algorithm.adv_type=reinpp", "algorithm.loss_type=actor", "actor.model.add_value_head=false"),
            [False, False, False],
        ),
    ],
    ids=["standard", "always", "no values"],
)
def test_final_observations_travel_where_their_value_counts(overrides: tuple[str, ...], expected: list[bool]) -> None:
    assert asked(*overrides) == expected


def test_an_evaluation_asks_for_no_values() -> None:
    assert asked(training=False) == [False, False, False]
