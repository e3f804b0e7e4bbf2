"""Returns, and bootstrapping at the ends of episodes.

Time comes first: [T, ...] is T steps of any number of trajectories. `dones[t]` tells that the episode ended with step t
(the d_{t+1} of the formulas), so that what follows belongs to another episode.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlinf_core.config.sections.values import Level

BootstrapType = Literal["standard", "always"]


def bootstrap_rewards(
    rewards: Tensor,
    terminations: Tensor,
    truncations: Tensor,
    final_values: Tensor,
    gamma: float,
    bootstrap_type: BootstrapType = "standard",
) -> Tensor:
    """Return rewards with the value of the rest of an episode added where it was cut off.

    An episode that reaches its limit of steps is not over for the value function: r_t + gamma V(final observation)
    stands for the rest (Pardo et al., "Time limits in reinforcement learning", arXiv 1712.00378).

    Args:
        rewards: float [T, ...].
        terminations: bool [T, ...], the task ended with this step.
        truncations: bool [T, ...], the episode was cut off after this step.
        final_values: float [T, ...], value of the observation in which the episode ended; anything elsewhere.
        gamma: discount by step.
        bootstrap_type: `standard` adds the value where an episode was cut off and had not ended by itself; `always` at
            every end, for tasks that end on success and would otherwise reward delay.

    Returns:
        float [T, ...].
    """
    at = truncations & ~terminations if bootstrap_type == "standard" else truncations | terminations
    # torch.where and not a product: what stands elsewhere may be NaN.
    return rewards + gamma * torch.where(at, final_values, 0)


def discounted_returns(rewards: Tensor, dones: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma (1 - d_{t+1}) G_{t+1}, with nothing after the last step.

    Args:
        rewards: float [T, ...].
        dones: bool [T, ...].
        gamma: discount by step.

    Returns:
        float [T, ...].
    """
    returns = torch.empty_like(rewards)
    after = torch.zeros_like(rewards[0])
    for step in range(len(rewards) - 1, -1, -1):
        after = rewards[step] + gamma * torch.where(dones[step], 0, after)
        returns[step] = after
    return returns


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 - Var(returns - values) / Var(returns), a scalar: 1 for perfect values, 0 for constant ones, below for worse.

    0 when the returns do not vary. Only the entries that `mask` marks count.
    """
    values, returns = values.detach(), returns.detach()
    if mask is not None:
        values, returns = values[mask.bool()], returns[mask.bool()]
    if returns.numel() < 2:
        return torch.zeros(())
    variance = returns.var(correction=0)
    unexplained = (returns - values).var(correction=0)
    return torch.where(variance > 0, 1 - unexplained / variance, torch.zeros_like(variance))


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
            `action_level` makes every action a step of its own: [T * C, B].
    """
    if level == "chunk_level":
        return rewards.sum(dim=-1), dones.any(dim=-1)
    return unfold_chunks(rewards), unfold_chunks(dones)


def unfold_chunks(values: Tensor) -> Tensor:
    """Reshape [T, B, C] to [T * C, B]: the actions of a chunk follow each other in time."""
    steps, batch, chunk = values.shape
    return values.transpose(1, 2).reshape(steps * chunk, batch)


def fold_chunks(values: Tensor, chunk: int) -> Tensor:
    """Reshape [T * C, B] to [T, B, C], the inverse of `unfold_chunks`."""
    steps, batch = values.shape
    return values.reshape(steps // chunk, chunk, batch).transpose(1, 2)
