"""Running statistics of states: those of all rows at once, whatever came in which step, and saved exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.embodied.learning.running_states import check_running, with_states
from recipes.embodied.models.normalization import Normalization, Statistics
from rlinf_core.errors import ConfigError

STEPS = [
    torch.tensor(np.random.default_rng(step).normal(7, 1 + step, (5, 4, 3)), dtype=torch.float32) for step in range(4)
]
EVERY = torch.ones(5, 4, dtype=torch.bool)


def run(normalization: Normalization, steps: list[Tensor]) -> Normalization:
    """Return the normalization after steps whose rows were normalized by what there was before each."""
    for states in steps:
        normalization = with_states(normalization, normalization.normalized_states(states), EVERY)
    return normalization


def test_running_statistics_are_those_of_all_rows() -> None:
    normalization = run(Normalization(), STEPS)
    rows = torch.cat(STEPS).double().flatten(0, 1).numpy()
    assert normalization.states is not None
    assert normalization.rows == len(rows) == 80
    np.testing.assert_allclose(normalization.states.mean, rows.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(normalization.states.std, rows.std(axis=0), rtol=1e-6)
    assert normalization.actions is None


def test_rows_after_an_episode_do_not_count() -> None:
    counted = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    normalization = with_states(Normalization(), STEPS[0], counted)
    assert normalization.states is not None
    np.testing.assert_allclose(normalization.states.mean, STEPS[0][counted].double().mean(dim=0), rtol=1e-9)
    assert with_states(normalization, STEPS[1], torch.zeros_like(EVERY)) == normalization


def test_actors_have_the_statistics_of_all_their_rows() -> None:
    """Each of two sends its sums to the other; the second repeats what the first of them adds up."""
    parts, sums = STEPS[0].split(2, dim=1), list[Tensor]()
    counted = EVERY[:, :2]

    def halves(part: Tensor, mean: Tensor | None) -> list[Tensor]:
        rows = part.double().flatten(0, 1)
        return [torch.tensor(10.0).double(), rows.sum(dim=0)] + (
            [] if mean is None else [(rows - mean).square().sum(0)]
        )

    whole = STEPS[0].double().flatten(0, 1)
    sums = halves(parts[1], whole.mean(dim=0))
    calls = iter(sums)
    normalization = with_states(Normalization(), parts[0], counted, lambda value: value + next(calls))
    assert normalization.rows == 20
    assert normalization.states is not None
    np.testing.assert_allclose(normalization.states.std, whole.std(dim=0, correction=0), rtol=1e-9)


def test_resuming_goes_on_bitwise(tmp_path: Path) -> None:
    half = run(Normalization(), STEPS[:2])
    half.save(tmp_path)
    again = Normalization.load(tmp_path)
    assert again == half
    assert run(again or Normalization(), STEPS[2:]) == run(half, STEPS[2:])


def test_statistics_of_demonstrations_do_not_run_on() -> None:
    check_running(Normalization())
    check_running(run(Normalization(), STEPS[:1]))
    with pytest.raises(ConfigError, match="the statistics that the policy was trained with"):
        check_running(Normalization("mean_std", states=Statistics.of(STEPS[0].flatten(0, 1).numpy())))
