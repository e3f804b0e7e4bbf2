"""Log-probabilities, entropies, rewards and ends of episodes at the level of tokens, actions or chunks."""

from __future__ import annotations

from torch import Tensor

from rlinf_core.config.sections.values import Level


def sum_to_level(values: Tensor, level: Level) -> Tensor:
    """Return log-probabilities or entropies of tokens, summed to a level.

    Args:
        values: float [..., C, D].
        level: `token_level` keeps [..., C, D], `action_level` gives [..., C], `chunk_level` gives [...].
    """
    if level == "token_level":
        return values
    return values.sum(dim=-1) if level == "action_level" else values.sum(dim=(-2, -1))


def rewards_to_level(rewards: Tensor, dones: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Return rewards and ends of episodes by action, [T, B, C], as the steps of a level.

    Args:
        rewards: float [T, B, C].
        dones: bool [T, B, C], whether the episode ended with that action.
        level: `chunk_level` sums the rewards of a chunk, which ends when any of its actions does: [T, B].
            `action_level` makes every action its own step: [T * C, B].
    """
    if level == "chunk_level":
        return rewards.sum(dim=-1), dones.any(dim=-1)
    return unfold_chunks(rewards), unfold_chunks(dones)


def leading(mask: Tensor, dimensions: int) -> Tensor:
    """Return a mask reduced to its first dimensions: a chunk counts if any of its actions does."""
    return mask if mask.dim() <= dimensions else mask.flatten(start_dim=dimensions).any(dim=-1) if dimensions else mask


def unfold_chunks(values: Tensor) -> Tensor:
    """Reshape [T, B, C] to [T * C, B]: the actions of a chunk follow each other in time."""
    steps, batch, chunk = values.shape
    return values.transpose(1, 2).reshape(steps * chunk, batch)


def fold_chunks(values: Tensor, chunk: int) -> Tensor:
    """Reshape [T * C, B] to [T, B, C], the inverse of `unfold_chunks`."""
    steps, batch = values.shape
    return values.reshape(steps // chunk, chunk, batch).transpose(1, 2)
