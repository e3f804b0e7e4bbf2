"""AdamW whose two moments take less memory than in float32."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn

from recipes.training.typed_tensors import is_shard, local_part

# Numbers that share a scale in `ByteStateAdamW`; rows of a weight that are shorter share it within the row.
BLOCK: Final = 256
# Weights of fewer numbers in a row keep float32 there: their scales would take more than is saved.
SHORTEST_ROW: Final = 32
# Elements that are computed at a time, so that what a step needs beside the state is bounded.
_AT_ONCE: Final = 1 << 22
# Codes of positive second moments are 1 to 255, of first moments -127 to 127.
_LEVELS, _STEEPEST = 254, 127
# Second moments further below the largest of their block, in powers of two, count as if they were so far.
_RANGE: Final = 40.0

State: TypeAlias = "dict[str, Tensor]"


class SmallStateAdamW(torch.optim.Optimizer, ABC):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) whose moments are rounded after each step.

    A step computes in float32 and rounds up or down at random, by how near either is: with beta2 = 0.999 a second
    moment falls by less than its storage resolves, and rounded to the nearest it would never fall. What is drawn
    depends on the number of the step, the weight and the shard alone, so that a run continues to the bit, and replicas
    of a shard stay equal.

    Args:
        groups: the groups of weights, as `torch.optim.AdamW` takes them.
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

    @abstractmethod
    def begin(self, weight: nn.Parameter) -> State:
        """Return the state of a weight that has not learned yet."""

    @abstractmethod
    def _moments(self, state: State) -> tuple[Tensor, Tensor]:
        """Return both moments of rows of a weight as new float32 tensors, [rows, columns]."""

    @abstractmethod
    def _keep(self, state: State, mean: Tensor, square: Tensor, generator: torch.Generator) -> None:
        """Round both moments of rows of a weight into their state. `mean` and `square` are used up."""

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
        """See `torch.optim.Optimizer.load_state_dict`, which would give moments the type of their weights."""
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
        """See `SmallStateAdamW`."""
        return _zeros(weight, torch.bfloat16, torch.bfloat16)

    def _moments(self, state: State) -> tuple[Tensor, Tensor]:
        return state["exp_avg"].float(), state["exp_avg_sq"].float()

    def _keep(self, state: State, mean: Tensor, square: Tensor, generator: torch.Generator) -> None:
        round_at_random(mean, state["exp_avg"], generator)
        round_at_random(square, state["exp_avg_sq"], generator)


class ByteStateAdamW(SmallStateAdamW):
    """AdamW with moments of a byte each, and scales for each block of a row (after Dettmers et al., arXiv 2110.02861).

    A second moment is one of 254 numbers that lie evenly, by their logarithm, between the smallest positive one of its
    block and the largest; none but 0 becomes 0, by which a step would be divided. A first moment is stored as its
    quotient by the root of the second: quotients of a block are alike in size, however unlike its moments are.
    Biases, norms and other weights of short rows keep float32.
    """

    def begin(self, weight: nn.Parameter) -> State:
        """See `SmallStateAdamW`; `scales` hold for each block the logarithm of the smallest second moment, the step
        between two of them, and the step between two quotients, [rows, blocks, 3].
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
    """Round float32 numbers to bfloat16, up or down at random, by how near either is. `exact` is used up."""
    bits = exact.view(torch.int32)
    bits.add_(torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator))
    # What is left below is cut off; the upper half is bfloat16.
    into.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))


def _squares(codes: Tensor, low: Tensor, spacing: Tensor) -> Tensor:
    """Return second moments by their codes, float32 [rows, blocks, n]; code 0 is 0."""
    exponents = (codes.float() - 1).mul_(spacing).add_(low)
    return exponents.exp2_().masked_fill_(codes == 0, 0.0)


def _coded_squares(square: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of second moments, float32 [rows, blocks, n], with logarithms of the smallest and the spacing."""
    logarithms = square.log2()
    top = logarithms.amax(-1, keepdim=True)
    is_empty = top.isneginf()
    top = top.masked_fill(is_empty, 0.0)
    low = logarithms.masked_fill(square == 0, math.inf).amin(-1, keepdim=True)
    low = torch.maximum(low.masked_fill(is_empty, 0.0), top - _RANGE)
    spacing = (top - low) / _LEVELS
    place = (torch.maximum(logarithms, low) - low).div_(spacing.masked_fill(spacing == 0, 1.0)).clamp_(0, _LEVELS)
    below = place.floor().clamp_(max=_LEVELS - 1)
    # Right on average: by where the number lies between both neighbours, and not its logarithm.
    share = (place - below).mul_(spacing).exp2_().sub_(1).div_(spacing.exp2().sub_(1)).nan_to_num_(0.0)
    draws = torch.rand(share.shape, device=share.device, generator=generator)
    codes = below.add_(1).add_(draws < share).masked_fill_(square == 0, 0.0)
    return codes, low, spacing


def _up_or_down(exact: Tensor, generator: torch.Generator) -> Tensor:
    """Return whole numbers beside `exact`, at random by how near either is. `exact` is used up."""
    return exact.add_(torch.rand(exact.shape, device=exact.device, generator=generator)).floor_()


def _blocks(rows: Tensor, blocks: int) -> Tensor:
    """Return rows of numbers in blocks, [rows, blocks, n]; the last one of a row is filled with zeros."""
    width = min(BLOCK, rows.shape[1])
    missing = blocks * width - rows.shape[1]
    return (nn.functional.pad(rows, (0, missing)) if missing else rows).view(len(rows), blocks, width)


def _flat(blocks: Tensor, columns: int) -> Tensor:
    """Return the rows of `_blocks`, [rows, columns]."""
    return blocks.flatten(1)[:, :columns]


def _zeros(weight: Tensor, mean: torch.dtype, square: torch.dtype) -> State:
    return {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(weight, dtype=mean),
        "exp_avg_sq": torch.zeros_like(weight, dtype=square),
    }


def _rows(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of a shape for each row of a weight, spread over ranks as its rows are."""
    if not is_shard(weight):
        return torch.zeros(len(weight), *shape, device=weight.device)
    from torch.distributed import tensor

    made: Any = tensor
    return made.zeros(len(weight), *shape, device_mesh=weight.device_mesh, placements=weight.placements)


def _parts(weight: nn.Parameter, state: State) -> Iterator[tuple[Tensor, Tensor, State]]:
    """Yield some rows of a weight's own part at a time, with their gradient and state; all share memory with theirs."""
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
    """Return a tensor as [rows, columns], in its memory; one of a single dimension as a column."""
    return tensor.view(len(tensor) if tensor.dim() else 1, -1)


def _shard_number(weight: Tensor) -> int:
    """Return which shard of a weight this rank has; replicas have the same."""
    number = 0
    if is_shard(weight):
        for dim, placement in enumerate(weight.placements):
            if placement.is_shard():
                number = number * weight.device_mesh.size(dim) + weight.device_mesh.get_local_rank(dim)
    return number
