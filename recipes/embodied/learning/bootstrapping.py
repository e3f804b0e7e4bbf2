"""Rewards at the end of episodes that were cut off: the value of the rest is added.

Time comes first: [T, ...] is T steps of any number of trajectories.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
