"""Batches of a replay buffer as tensors."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.off_policy.critic_learner import TransitionTensors
from recipes.embodied.replay.replay_types import ReplayBatch


def to_tensors(batch: ReplayBatch, policy: BasePolicy, device: torch.device) -> TransitionTensors:
    """Return a batch on a device, its observations as the policy prepares them."""

    def moved(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

    return TransitionTensors(
        policy.prepare(batch.observations),
        moved(batch.actions),
        moved(batch.rewards),
        moved(batch.discounts),
        policy.prepare(batch.next_observations),
        moved(batch.weights),
    )
