"""Gradients of several ranks become one, without the ranks."""

# torch has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.training.sharding import ParallelStrategy, Replicated


@pytest.mark.parametrize("reduce_type", [None, torch.bfloat16])
def test_gradients_are_averaged_in_one_message(
    monkeypatch: pytest.MonkeyPatch, reduce_type: torch.dtype | None
) -> None:
    sent: list[Tensor] = []

    def all_reduce(values: Tensor) -> None:
        """As if the other rank had three times the gradients."""
        sent.append(values.clone())
        values *= 4

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3) / 3).sum().backward()
    # A head of values that no loss asks for.
    module.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    Replicated(module, 2, reduce_type=reduce_type).finish_gradients()
    (message,) = sent
    assert message.dtype == (reduce_type or torch.float32)
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    torch.testing.assert_close(module.weight.grad, torch.full((2, 3), 2 / 3), rtol=0, atol=1e-2)


def test_norms_of_large_gradients_are_exact() -> None:
    policy = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (3, 1 << 16, (1 << 21) + 7)])
    generator = torch.Generator().manual_seed(0)
    for weight in policy:
        weight.grad = torch.randn(weight.shape, generator=generator) * 1e-4
    exact = torch.cat([weight.grad.double() for weight in policy if weight.grad is not None]).norm()
    norm = ParallelStrategy(policy).gradient_norm()
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)


def test_without_gradients_the_norm_is_zero() -> None:
    assert float(ParallelStrategy(nn.Linear(2, 2)).gradient_norm()) == 0


def test_norm_is_on_the_device_of_the_gradients() -> None:
    # Without an accelerator: torch's device of shapes alone.
    module = nn.Linear(300, 300, device="meta")
    for weight in module.parameters():
        weight.grad = torch.empty_like(weight)
    assert ParallelStrategy(module).gradient_norm().device.type == "meta"
