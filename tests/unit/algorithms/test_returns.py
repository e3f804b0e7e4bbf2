"""Bootstrapping, discounted returns, and explained variance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.training.tensors import explained_variance
from rlinf_core.algorithms.returns import BootstrapType, bootstrap_rewards, discounted_returns


@pytest.mark.parametrize(("how", "expected"), [("standard", [1.0, 1.0, 6.0, 1.0]), ("always", [1.0, 6.0, 6.0, 6.0])])
def test_the_value_of_the_rest_is_added_at_ends(how: BootstrapType, expected: list[float]) -> None:
    """One step of four trajectories: goes on, terminated, cut off, both at once."""
    found = bootstrap_rewards(
        torch.ones(1, 4),
        terminations=torch.tensor([[0, 1, 0, 1]]).bool(),
        truncations=torch.tensor([[0, 0, 1, 1]]).bool(),
        final_values=torch.tensor([[float("nan"), 10.0, 10.0, 10.0]]),
        gamma=0.5,
        bootstrap_type=how,
    )
    assert found.tolist() == [expected]


@given(st.integers(0, 1000), st.floats(0, 1))
def test_discounted_returns_equal_a_loop(seed: int, gamma: float) -> None:
    random = torch.Generator().manual_seed(seed)
    rewards = torch.randn(6, 3, generator=random, dtype=torch.float64)
    dones = torch.rand(6, 3, generator=random) < 0.3
    expected = torch.zeros_like(rewards)
    for b in range(3):
        for start in range(6):
            for step in range(start, 6):
                expected[start, b] += gamma ** (step - start) * rewards[step, b]
                if dones[step, b]:
                    break
    torch.testing.assert_close(discounted_returns(rewards, dones, gamma), expected)


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(torch.zeros(4), returns).item() == 0
    assert explained_variance(-returns, returns).item() == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4)).item() == 0
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(torch.tensor([1.0, 2.0, 3.0, 99.0]), returns, mask).item() == 1
