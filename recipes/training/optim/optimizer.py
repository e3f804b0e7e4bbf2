"""The optimizer of a policy, its learning rates and its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import unwrap
from typing import Any, Final

import torch
from torch import nn

from recipes.sections.actor import OptimConfig
from recipes.training.optim.small_moments import ByteStateAdamW, HalfStateAdamW

# Parts of the names of weights that only values depend on: they may have their own learning rate.
VALUE_PARTS = frozenset({"critic", "value_head"})


class EagerAdamW(torch.optim.AdamW):
    """AdamW that is never compiled.

    torch wraps these methods to keep `torch.compile` out of them, and imports the compiler for that at the first call,
    a second or two of each start. Without the wrappers they do the same.
    """

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; see `torch.optim.AdamW.step`."""
        return _unwrapped_step(self, closure)


_unwrapped_step: Callable[..., float | None] = unwrap(torch.optim.AdamW.step)  # pyright: ignore[reportUnknownArgumentType]


_ADAMS: Final[Mapping[str, Any]] = {
    "fp32": partial(EagerAdamW, fused=True),
    "bf16": HalfStateAdamW,
    "int8": ByteStateAdamW,
}


def make_optimizer(policy: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW on all trainable weights; those of values at their own rate.

    The fused kernel is one pass over each weight instead of a dozen: on small policies the difference is felt.
    """
    named = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [weight for name, weight in named if not of_values(name)]}]
    values = [weight for name, weight in named if of_values(name)]
    if values:
        groups.append({"params": values, "lr": config.rate_of_values})
    return _ADAMS[config.state_dtype](
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def learning_rate_factor(config: OptimConfig, step: int, last_step: int | None) -> float:
    """Return the factor of all learning rates in a training step, as `optim.lr_scheduler` says.

    Warmup rises in a line, step / (`lr_warmup_steps` + 1). What follows falls to `min_lr_ratio` by the end, in a line
    or in half a cosine (Loshchilov & Hutter, "SGDR", arXiv 1608.03983, eq. 5). A pure function of the step, so that a
    resumed run needs no state.

    Args:
        config: the section `actor.optim`.
        step: the training step, from 1.
        last_step: the last step after which the run ends, where `total_training_steps` does not say.
    """
    warmup = config.lr_warmup_steps
    if step <= warmup:
        return step / (warmup + 1)
    total = config.total_training_steps or last_step
    if config.lr_scheduler == "constant" or total is None:
        return 1.0
    progress = min(1.0, (step - 1 - warmup) / max(1, total - warmup))
    left = (1 + math.cos(math.pi * progress)) / 2 if config.lr_scheduler == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


def apply_settings(optimizer: torch.optim.Optimizer, config: OptimConfig, factor: float) -> None:
    """Apply the configured settings to an optimizer of `make_optimizer`, overriding those of a loaded checkpoint.

    Args:
        optimizer: is changed in place.
        config: the section `actor.optim`.
        factor: the factor of the learning rates.
    """
    rates = (config.lr, config.rate_of_values)
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate * factor
        group["betas"] = (config.adam_beta1, config.adam_beta2)
        group["eps"] = config.adam_eps
        group["weight_decay"] = config.weight_decay


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer to a device."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                state[name] = value.to(device)


def of_values(name: str) -> bool:
    """Return whether only values depend on the weight of this name."""
    return not VALUE_PARTS.isdisjoint(name.split("."))
