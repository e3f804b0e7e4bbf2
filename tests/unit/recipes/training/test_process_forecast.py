"""Forecasts of processes: what lies on the host, and what on an accelerator."""

from __future__ import annotations

import pytest

from recipes.training.memory.process_forecast import ProcessForecast

PARTS = {"base": 300, "weights": 100, "optimizer": 200, "activations": 50, "trajectories": 7}


@pytest.mark.parametrize(
    ("accelerated", "offloads", "held"),
    [
        (False, False, (657, 0)),
        # Weights are loaded on the host.
        (True, False, (407, 350)),
        # Weights and the optimizer's state wait there.
        (True, True, (607, 350)),
    ],
)
def test_parts_lie_where_they_are_computed_with(accelerated: bool, offloads: bool, held: tuple[int, int]) -> None:
    forecast = ProcessForecast("actor", 2, PARTS, offloads=offloads)
    assert forecast.held(accelerated=accelerated) == held
