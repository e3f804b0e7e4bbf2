"""Adam whose moments are kept in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.optimizer import make_optimizer, round_at_random
from recipes.training.state.training_state import TrainingState

HOST = torch.device("cpu")


def quadratic(dtype: str, steps: int, **keys: float) -> torch.Tensor:
    """Return weights after steps down a noisy slope."""
    torch.manual_seed(0)
    module = nn.Linear(64, 32)
    optimizer = make_optimizer(module, OptimConfig.model_validate({"lr": 1e-2, "state_dtype": dtype, **keys}))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 64, generator=generator)
        (module(inputs) - inputs[:, :32]).pow(2).mean().backward()
        optimizer.step()
    return module.weight.detach()


def test_rounding_is_right_on_average() -> None:
    exact = torch.full((1 << 16,), 1 + 2**-7 / 4)
    rounded = torch.empty_like(exact, dtype=torch.bfloat16)
    round_at_random(exact.clone(), rounded, torch.Generator().manual_seed(0))
    assert set(rounded.float().tolist()) == {1.0, 1 + 2**-7}
    assert abs(float(rounded.float().mean() - exact[0])) < 1e-4


def test_rounding_keeps_what_is_exact_and_what_is_not_finite() -> None:
    exact = torch.tensor([0.0, -2.5, float("inf"), -float("inf")])
    rounded = torch.empty_like(exact, dtype=torch.bfloat16)
    round_at_random(exact.clone(), rounded, torch.Generator().manual_seed(0))
    assert rounded.float().tolist() == exact.tolist()


def test_half_the_bits_learn_what_all_learn() -> None:
    keys = {"adam_beta2": 0.999, "weight_decay": 0.01}
    whole, half = (quadratic(dtype, 200, **keys) for dtype in ("fp32", "bf16"))
    start = quadratic("fp32", 0)
    assert (half - whole).norm() < 0.02 * (whole - start).norm()


def test_one_step_is_adam_s_own() -> None:
    whole, half = (quadratic(dtype, 1, weight_decay=0.1) for dtype in ("fp32", "bf16"))
    torch.testing.assert_close(half, whole, rtol=1e-6, atol=1e-7)


def made() -> TrainingState:
    torch.manual_seed(0)
    optim = OptimConfig(lr=0.1, state_dtype="bf16")
    return TrainingState(nn.Linear(3, 4), optim, FsdpConfig(), rank=0, world_size=1, device=HOST)


def learn(state: TrainingState) -> None:
    state.optimizer.zero_grad()
    state.policy(torch.ones(2, 3)).pow(2).sum().backward()
    state.optimizer.step()


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    straight, resumed = made(), made()
    learn(straight)
    straight.save(str(tmp_path))
    learn(straight)
    resumed.load(str(tmp_path))
    learn(resumed)
    expected = straight.policy.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.policy.state_dict().items())
    for mine, theirs in zip(resumed.optimizer.state.values(), straight.optimizer.state.values(), strict=True):
        assert mine["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
