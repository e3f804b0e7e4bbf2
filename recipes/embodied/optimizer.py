"""The optimizer of a policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlinf_core.config.fragments.actor import OptimConfig

# Parts of the names of those weights that only values depend on, which may learn at a rate of their own.
VALUE_PARTS = frozenset({"critic", "value_head"})


def make_optimizer(policy: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW on all weights that learn; those of values at `value_lr` where that is given.

    The fused kernel is one pass over each weight instead of a dozen: on small policies the difference is felt.
    """
    named = [(name, each) for name, each in policy.named_parameters() if each.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [each for name, each in named if not _of_values(name)]}]
    values = [each for name, each in named if _of_values(name)]
    if values:
        groups.append({"params": values, "lr": config.value_lr or config.lr})
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move what the optimizer remembers to a device."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                state[name] = value.to(device)


def _of_values(name: str) -> bool:
    return not VALUE_PARTS.isdisjoint(name.split("."))
