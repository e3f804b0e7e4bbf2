"""Sums over the tokens of actions, and the actions of chunks in time."""

from __future__ import annotations

import torch

from recipes.embodied.learning.trajectory import flatten_chunks, fold_chunks, rewards_to_level, sum_to_level


def test_levels_sum_over_tokens_and_actions() -> None:
    values = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(sum_to_level(values, "token_level"), values)
    assert sum_to_level(values, "action_level").tolist() == [[6, 22, 38], [54, 70, 86]]
    assert sum_to_level(values, "chunk_level").tolist() == [66, 210]


def test_chunks_unfold_in_time() -> None:
    rewards = torch.arange(12.0).reshape(2, 2, 3)  # two chunks of three actions, two trajectories
    assert flatten_chunks(rewards)[:, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert torch.equal(fold_chunks(flatten_chunks(rewards), 3), rewards)
    dones = rewards == 7
    by_chunk, ends = rewards_to_level(rewards, dones, "chunk_level")
    assert by_chunk.tolist() == [[3, 12], [21, 30]]
    assert ends.tolist() == [[False, False], [True, False]]
    by_action, ends = rewards_to_level(rewards, dones, "action_level")
    assert by_action.shape == ends.shape == (6, 2)
    assert ends[:, 0].tolist() == [False, False, False, False, True, False]
