"""Whether a step changes weights, and a precision that rounds small steps away."""

from __future__ import annotations

import torch
from torch import nn

from recipes.training.updater import WeightSample


def changed_by(step: float, dtype: torch.dtype) -> float:
    module = nn.Linear(16, 16, dtype=dtype)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    sample = WeightSample.of(module)
    assert sample is not None
    with torch.no_grad():
        for weight in module.parameters():
            weight += step
    return sample.changed()


def test_small_steps_vanish_in_bf16_and_not_in_fp32() -> None:
    assert changed_by(1e-5, torch.float32) == 1.0
    assert changed_by(1e-5, torch.bfloat16) == 0.0
    assert changed_by(1e-1, torch.bfloat16) == 1.0


def test_numbers_without_a_gradient_do_not_count() -> None:
    module = nn.Embedding(4, 2)
    module.weight.grad = torch.zeros_like(module.weight)
    module.weight.grad[1] = 1.0
    sample = WeightSample.of(module)
    assert sample is not None
    with torch.no_grad():
        module.weight[1, 0] += 1.0
    assert sample.changed() == 0.5


def test_module_without_gradients_has_no_sample() -> None:
    module = nn.Linear(2, 2)
    assert WeightSample.of(module) is None
    module.weight.grad = torch.zeros_like(module.weight)
    sample = WeightSample.of(module)
    assert sample is not None
    assert sample.changed() == 1.0
