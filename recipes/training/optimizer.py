"""The optimizer of a policy, its learning rates and its state."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.sections.actor import OptimConfig
from recipes.training.typed_tensors import local_part

# Parts of the names of weights that only values depend on: they may have a learning rate of their own.
VALUE_PARTS = frozenset({"critic", "value_head"})
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


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


class HalfStateAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) whose two moments are kept in bfloat16.

    A step computes in float32 and rounds each moment up or down at random, by how near either is: with beta2 = 0.999 a
    second moment falls by less than half a step of bfloat16, and rounded to the nearest it would never fall. What is
    drawn depends on the number of the step, the weight and the rank alone, so that a run goes on to the bit.

    Args:
        groups: of weights, as `torch.optim.AdamW` takes them.
        lr, betas, eps, weight_decay: see `torch.optim.AdamW`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step; see `torch.optim.AdamW.step`."""
        loss = None if closure is None else closure()
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    self._update(weight, group, number)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`, which gives moments the type of their weights."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in _MOMENTS:
                state[name] = state[name].to(torch.bfloat16)

    def _update(self, weight: nn.Parameter, group: dict[str, Any], number: int) -> None:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            for name in _MOMENTS:
                state[name] = torch.zeros_like(weight, dtype=torch.bfloat16)
        state["step"] += 1
        count = int(state["step"])
        beta1, beta2 = group["betas"]
        mine, gradient = local_part(weight.detach()), local_part(cast("Tensor", weight.grad)).float()
        mean, square = (local_part(state[name]) for name in _MOMENTS)
        exact_mean = mean.float().lerp_(gradient, 1 - beta1)
        exact_square = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = exact_square.sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
        mine.mul_(1 - group["lr"] * group["weight_decay"])
        mine.addcdiv_(exact_mean, divisor, value=-group["lr"] / (1 - beta1**count))
        generator = torch.Generator(mine.device).manual_seed((count * 1_000_003 + number) * 4096 + _rank())
        round_at_random(exact_mean, mean, generator)
        round_at_random(exact_square, square, generator)


def round_at_random(exact: Tensor, into: Tensor, generator: torch.Generator) -> None:
    """Round float32 numbers to bfloat16, up or down at random, by how near either is. `exact` is used up."""
    bits = exact.view(torch.int32)
    bits.add_(torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator))
    # What is left below is cut off; the upper half is bfloat16.
    into.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def make_optimizer(policy: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW on all trainable weights; those of values at their own rate.

    The fused kernel is one pass over each weight instead of a dozen: on small policies the difference is felt.
    """
    named = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [weight for name, weight in named if not of_values(name)]}]
    values = [weight for name, weight in named if of_values(name)]
    if values:
        groups.append({"params": values, "lr": config.rate_of_values})
    made: Any = partial(EagerAdamW, fused=True) if config.state_dtype == "fp32" else HalfStateAdamW
    return made(
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
        last_step: after which the run ends, where `total_training_steps` does not say.
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
        factor: of the learning rates.
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
