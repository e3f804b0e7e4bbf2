"""AdamW for a policy, with its learning rates and state, and variants whose moments take less memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import unwrap
from itertools import chain
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn

from recipes.sections.actor import OptimConfig
from recipes.training.typed_tensors import is_shard, local_part

# Numbers that share a scale in `ByteStateAdamW`; a shorter row has one block.
BLOCK: Final = 256
# Weights with fewer numbers per row keep float32 moments: scales would take more memory than the bytes save.
SHORTEST_ROW: Final = 32
# Elements that a step computes at a time, to bound its memory beside the state.
_AT_ONCE: Final = 1 << 22
# Codes of positive second moments are 1 to 255; codes of first moments are -127 to 127.
_LEVELS, _STEEPEST = 254, 127
# The range of second moments in a block, in powers of two below the largest; smaller ones are clamped.
_RANGE: Final = 40.0

State: TypeAlias = "dict[str, Tensor]"


class SmallStateAdamW(torch.optim.Optimizer, ABC):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) whose moments are rounded after each step.

    A step computes in float32 and rounds stochastically: with beta2 = 0.999 a second moment falls by less than its
    storage resolves, and would never fall if rounded to nearest. The random numbers depend only on the step, the weight
    and the shard, so that a resumed run is bit-identical and replicas of a shard stay equal.

    Args:
        groups: the groups of weights, as `torch.optim.AdamW` takes them.
        settings: `lr`, `betas`, `eps` and `weight_decay`, see `torch.optim.AdamW`.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: float | tuple[float, float]) -> None:
        super().__init__(groups, dict(settings))

    @abstractmethod
    def begin(self, weight: nn.Parameter) -> State:
        """Return the initial state of a weight."""

    @abstractmethod
    def _moments(self, state: State) -> tuple[Tensor, Tensor]:
        """Return both moments of rows of a weight as new float32 tensors, [rows, columns]."""

    @abstractmethod
    def _keep(self, state: State, mean: Tensor, square: Tensor, generator: torch.Generator) -> None:
        """Round both moments of rows of a weight into their state. Overwrites `mean` and `square`."""

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
        """See `torch.optim.Optimizer.load_state_dict`, which would cast moments to the type of their weights."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        weights = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, weight in zip(numbers, weights, strict=True):
            stored: State | None = state_dict["state"].get(number)
            if stored is not None:
                self.state[weight] = {
                    name: value if name == "step" else value.to(weight.device) for name, value in stored.items()
                }

    def _update(self, weight: nn.Parameter, group: dict[str, Any], number: int) -> None:
        state: State = self.state[weight]
        if not state:
            state.update(self.begin(weight))
        state["step"] += 1
        count = int(state["step"])
        beta1, beta2 = group["betas"]
        device = local_part(weight).device
        generator = torch.Generator(device).manual_seed((count * 1_000_003 + number) * 4096 + _shard_number(weight))
        for mine, gradient, part in _parts(weight, state):
            mean, square = self._moments(part)
            mean.lerp_(gradient.float(), 1 - beta1)
            square.mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
            divisor = square.sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
            mine.mul_(1 - group["lr"] * group["weight_decay"])
            mine.addcdiv_(mean, divisor, value=-group["lr"] / (1 - beta1**count))
            del divisor
            self._keep(part, mean, square, generator)


class HalfStateAdamW(SmallStateAdamW):
    """AdamW with moments in bfloat16."""

    def begin(self, weight: nn.Parameter) -> State:
        return _zeros(weight, torch.bfloat16, torch.bfloat16)

    def _moments(self, state: State) -> tuple[Tensor, Tensor]:
        return state["exp_avg"].float(), state["exp_avg_sq"].float()

    def _keep(self, state: State, mean: Tensor, square: Tensor, generator: torch.Generator) -> None:
        round_at_random(mean, state["exp_avg"], generator)
        round_at_random(square, state["exp_avg_sq"], generator)


class ByteStateAdamW(SmallStateAdamW):
    """AdamW with moments of a byte each, and scales for each block of a row (after Dettmers et al., arXiv 2110.02861).

    A second moment is rounded to one of 255 values, evenly spaced by logarithm from the smallest positive one of its
    block to the largest; only 0 becomes 0, since the step divides by its root. A first moment is stored as its quotient
    by the root of the second: the quotients in a block are similar in size even if the moments are not. Biases, norms
    and other weights with short rows keep float32 moments.
    """

    def begin(self, weight: nn.Parameter) -> State:
        """See `SmallStateAdamW`; `scales` [rows, blocks, 3] hold for each block the logarithm of the smallest second
        moment, the spacing of the logarithms, and the spacing of the quotients.
        """
        columns = math.prod(weight.shape[1:])
        if weight.dim() < 2 or columns < SHORTEST_ROW:
            return _zeros(weight, torch.float32, torch.float32)
        blocks = -(-columns // BLOCK)
        return {**_zeros(weight, torch.int8, torch.uint8), "scales": _rows(weight, (blocks, 3))}

    def _moments(self, state: State) -> tuple[Tensor, Tensor]:
        if "scales" not in state:
            return state["exp_avg"].clone(), state["exp_avg_sq"].clone()
        low, spacing, step = (scale[..., None] for scale in state["scales"].unbind(-1))
        columns = state["exp_avg"].shape[1]
        codes = _blocks(state["exp_avg_sq"], low.shape[1])
        square = _squares(codes, low, spacing)
        mean = _blocks(state["exp_avg"], low.shape[1]).float().mul_(step).mul_(square.sqrt())
        return _flat(mean, columns), _flat(square, columns)

    def _keep(self, state: State, mean: Tensor, square: Tensor, generator: torch.Generator) -> None:
        if "scales" not in state:
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            return
        scales, columns = state["scales"], mean.shape[1]
        mean, square = _blocks(mean, scales.shape[1]), _blocks(square, scales.shape[1])
        codes, low, spacing = _coded_squares(square, generator)
        quotient = mean.div_(_squares(codes, low, spacing).sqrt_()).nan_to_num_(0.0, 0.0, 0.0)
        step = quotient.abs().amax(-1, keepdim=True).div_(_STEEPEST)
        whole = _up_or_down(quotient.div_(step).nan_to_num_(0.0), generator).clamp_(-_STEEPEST, _STEEPEST)
        state["exp_avg"].copy_(_flat(whole, columns))
        state["exp_avg_sq"].copy_(_flat(codes, columns))
        scales.copy_(torch.cat((low, spacing, step), -1))


def round_at_random(exact: Tensor, into: Tensor, generator: torch.Generator) -> None:
    """Round float32 numbers to bfloat16 stochastically. Overwrites `exact`."""
    bits = exact.view(torch.int32)
    bits.add_(torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator))
    # The lower half is truncated; the upper half is the bfloat16.
    into.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))


def _squares(codes: Tensor, low: Tensor, spacing: Tensor) -> Tensor:
    """Decode second moments, float32 [rows, blocks, n]; code 0 is 0."""
    exponents = (codes.float() - 1).mul_(spacing).add_(low)
    return exponents.exp2_().masked_fill_(codes == 0, 0.0)


def _coded_squares(square: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of second moments, float32 [rows, blocks, n], the logarithm of each block's smallest, and the
    spacing.
    """
    logarithms = square.log2()
    top = logarithms.amax(-1, keepdim=True)
    is_empty = top.isneginf()
    top = top.masked_fill(is_empty, 0.0)
    low = logarithms.masked_fill(square == 0, math.inf).amin(-1, keepdim=True)
    low = torch.maximum(low.masked_fill(is_empty, 0.0), top - _RANGE)
    spacing = (top - low) / _LEVELS
    place = (torch.maximum(logarithms, low) - low).div_(spacing.masked_fill(spacing == 0, 1.0)).clamp_(0, _LEVELS)
    below = place.floor().clamp_(max=_LEVELS - 1)
    # Unbiased: the probability depends on the number's position between its neighbors, not that of its logarithm.
    share = (place - below).mul_(spacing).exp2_().sub_(1).div_(spacing.exp2().sub_(1)).nan_to_num_(0.0)
    draws = torch.rand(share.shape, device=share.device, generator=generator)
    codes = below.add_(1).add_(draws < share).masked_fill_(square == 0, 0.0)
    return codes, low, spacing


def _up_or_down(exact: Tensor, generator: torch.Generator) -> Tensor:
    """Round `exact` to integers stochastically. Overwrites `exact`."""
    return exact.add_(torch.rand(exact.shape, device=exact.device, generator=generator)).floor_()


def _blocks(rows: Tensor, blocks: int) -> Tensor:
    """Return rows split into blocks, [rows, blocks, n]; the last block of a row is padded with zeros."""
    width = min(BLOCK, rows.shape[1])
    missing = blocks * width - rows.shape[1]
    return (nn.functional.pad(rows, (0, missing)) if missing else rows).view(len(rows), blocks, width)


def _flat(blocks: Tensor, columns: int) -> Tensor:
    """Undo `_blocks`: return [rows, columns]."""
    return blocks.flatten(1)[:, :columns]


def _zeros(weight: Tensor, mean: torch.dtype, square: torch.dtype) -> State:
    return {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(weight, dtype=mean),
        "exp_avg_sq": torch.zeros_like(weight, dtype=square),
    }


def _rows(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of a shape for each row of a weight, sharded as the weight is."""
    if not is_shard(weight):
        return torch.zeros(len(weight), *shape, device=weight.device)
    from torch.distributed import tensor

    made: Any = tensor
    return made.zeros(len(weight), *shape, device_mesh=weight.device_mesh, placements=weight.placements)


def _parts(weight: nn.Parameter, state: State) -> Iterator[tuple[Tensor, Tensor, State]]:
    """Yield this rank's part of a weight some rows at a time, with their gradient and state, all as views."""
    mine = local_part(weight.detach())
    if not mine.numel():
        return
    tensors = {name: local_part(value) for name, value in state.items() if name != "step"}
    scales = tensors.pop("scales", None)
    rows = {name: _in_rows(value) for name, value in tensors.items()}
    weights, gradients = _in_rows(mine), local_part(cast("Tensor", weight.grad)).reshape(_in_rows(mine).shape)
    many = max(1, _AT_ONCE // weights.shape[1])
    for start in range(0, len(weights), many):
        chosen = slice(start, start + many)
        part = {name: value[chosen] for name, value in rows.items()}
        yield weights[chosen], gradients[chosen], part if scales is None else {**part, "scales": scales[chosen]}


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as [rows, columns]; a 1-D tensor becomes a column."""
    return tensor.view(len(tensor) if tensor.dim() else 1, -1)


def _shard_number(weight: Tensor) -> int:
    """Return the number of this rank's shard of a weight, the same for its replicas."""
    number = 0
    if is_shard(weight):
        for dim, placement in enumerate(weight.placements):
            if placement.is_shard():
                number = number * weight.device_mesh.size(dim) + weight.device_mesh.get_local_rank(dim)
    return number


# Name parts of weights that only values depend on, which may have their own learning rate.
VALUE_PARTS = frozenset({"critic", "value_head"})


class EagerAdamW(torch.optim.AdamW):
    """AdamW that is never compiled.

    torch wraps these methods to keep `torch.compile` out of them, and for that imports the compiler at the first call,
    which takes a second or two. The unwrapped methods do the same.
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
    """Return AdamW on all trainable weights, with a separate learning rate for weights of values.

    The fused kernel passes over each weight once instead of a dozen times, which matters for small policies.
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

    Warmup is linear, step / (`lr_warmup_steps` + 1). The rate then falls to `min_lr_ratio` by the end, linearly or
    along half a cosine (Loshchilov & Hutter, "SGDR", arXiv 1608.03983, eq. 5). The factor is a pure function of the
    step, so that a resumed run needs no state.

    Args:
        config: the section `actor.optim`.
        step: the training step, from 1.
        last_step: the last step of the run, used if `total_training_steps` is not set.
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
    """Return whether only values depend on the weight with this name."""
    return not VALUE_PARTS.isdisjoint(name.split("."))
