"""Rewards at the end of episodes that were cut off."""

from __future__ import annotations

import torch

from recipes.embodied.learning.batch import bootstrap_rewards


def test_value_of_the_rest_is_added_where_an_episode_is_cut() -> None:
    """One step of four trajectories: goes on, terminated, cut off, both at once."""
    result = bootstrap_rewards(
        torch.ones(1, 4),
        terminations=torch.tensor([[0, 1, 0, 1]]).bool(),
        truncations=torch.tensor([[0, 0, 1, 1]]).bool(),
        final_values=torch.tensor([[float("nan"), 10.0, 10.0, 10.0]]),
        gamma=0.5,
    )
    assert result.tolist() == [[1.0, 1.0, 6.0, 1.0]]
