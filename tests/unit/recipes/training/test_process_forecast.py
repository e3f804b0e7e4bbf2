"""Forecasts of processes: what lies on the host, and what on an accelerator."""

from __future__ import annotations

import pytest

from recipes.sections.actor import FsdpConfig
from recipes.training.memory_parts import shard_parts
from rlinf_core.job.recipe import ACCELERATOR_LIBRARIES, ProcessForecast

PARTS = {"base": 300, "weights": 100, "optimizer": 200, "activations": 50, "trajectories": 7}


@pytest.mark.parametrize(
    ("accelerated", "offloads", "held"),
    [
        (False, False, (657, 0)),
        # Weights are loaded on the host.
        (True, False, (407 + ACCELERATOR_LIBRARIES, 350)),
        # Weights and the optimizer's state wait there.
        (True, True, (607 + ACCELERATOR_LIBRARIES, 350)),
    ],
)
def test_parts_lie_where_they_are_computed_with(accelerated: bool, offloads: bool, held: tuple[int, int]) -> None:
    forecast = ProcessForecast("actor", 2, PARTS, offloads=offloads)
    assert forecast.held(accelerated=accelerated) == held


def test_a_part_may_take_less_on_an_accelerator() -> None:
    forecast = ProcessForecast("actor", 2, PARTS, on_accelerator={"activations": 40})
    assert forecast.held(accelerated=False) == (657, 0)
    assert forecast.held(accelerated=True) == (407 + ACCELERATOR_LIBRARIES, 340)
    assert forecast.parts_of(accelerated=True) == {**PARTS, "activations": 40}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, {"weights": 50, "gradients": 20, "optimizer": 40}),
        ({"sharding_strategy": "no_shard"}, {"weights": 100, "gradients": 40, "optimizer": 80}),
        ({"cpu_offload": True}, {"offloaded shards": 110}),
    ],
)
def test_shards_divide_what_training_holds(settings: dict[str, object], parts: dict[str, int]) -> None:
    assert shard_parts(100, 40, FsdpConfig.model_validate(settings), 2) == parts
