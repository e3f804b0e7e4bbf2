"""Adam whose moments are kept in bfloat16 or in bytes."""

# torch has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.memory_parts import shard_parts
from recipes.training.optim.optimizer import ByteStateAdamW, make_optimizer, round_at_random
from recipes.training.state.training_state import TrainingState
from tests.unit.recipes.training.small_moment_ranks import CASES
from tests.unit.recipes.two_processes import run_two

HOST = torch.device("cpu")
SMALL = pytest.mark.parametrize("dtype", ["bf16", "int8"])


def quadratic(dtype: str, steps: int, **keys: float) -> torch.Tensor:
    """Return weights after steps down a noisy slope, whose inputs are of unlike sizes."""
    torch.manual_seed(0)
    module = nn.Linear(300, 32)
    optimizer = make_optimizer(module, OptimConfig.model_validate({"lr": 1e-2, "state_dtype": dtype, **keys}))
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-3, 0, 300)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 300, generator=generator) * sizes
        (module(inputs) - inputs[:, -32:]).pow(2).mean().backward()
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


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.02), ("int8", 0.05)])
def test_small_moments_learn_what_whole_ones_learn(dtype: str, bound: float, beta2: float) -> None:
    keys = {"adam_beta2": beta2, "weight_decay": 0.01}
    whole, small = (quadratic(kind, 200, **keys) for kind in ("fp32", dtype))
    start = quadratic("fp32", 0)
    assert (small - whole).norm() < bound * (whole - start).norm()


@SMALL
def test_one_step_is_adam_s_own(dtype: str) -> None:
    whole, small = (quadratic(kind, 1, weight_decay=0.1) for kind in ("fp32", dtype))
    torch.testing.assert_close(small, whole, rtol=1e-6, atol=1e-7)


class TestBytes:
    def state_of(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state after a step of which nothing but the gradient counts."""
        weight = nn.Parameter(torch.zeros_like(gradient))
        optimizer = ByteStateAdamW([{"params": [weight]}], lr=0.1, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
        weight.grad = gradient
        optimizer.step()
        return optimizer.state[weight]

    def moments(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both stored moments after such a step."""
        optimizer = ByteStateAdamW([{"params": [nn.Parameter(gradient)]}], lr=1, betas=(0, 0), eps=0, weight_decay=0)
        return optimizer._moments(self.state_of(gradient))  # pyright: ignore[reportPrivateUsage] - what is stored

    def test_moments_of_unlike_sizes_are_stored_within_a_part(self) -> None:
        gradient = torch.randn(20, 700, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 0, 700)
        mean, square = self.moments(gradient)
        assert ((square / gradient.square() - 1).abs()).max() < 0.12
        assert ((mean / gradient - 1).abs()).max() < 0.08

    def test_stored_moments_are_right_on_average(self) -> None:
        gradient = torch.full((4096, 64), 0.5)
        gradient[:, 0], gradient[:, 1] = 0.01, 3.0
        mean, square = self.moments(gradient)
        assert abs(float(square[:, 2:].mean() / 0.25 - 1)) < 1e-3
        assert abs(float(mean[:, 2:].mean() / 0.5 - 1)) < 3e-3

    def test_no_positive_second_moment_becomes_zero(self) -> None:
        gradient = torch.ones(2, 256)
        gradient[0, :100], gradient[1, :100] = 1e-12, 0.0
        mean, square = self.moments(gradient)
        assert (square[0] > 0).all()
        assert not square[1, :100].any()
        assert not mean[1, :100].any()

    def test_rows_and_short_weights_without_gradients_stay_zero(self) -> None:
        assert not self.moments(torch.zeros(3, 300))[1].any()
        assert self.state_of(torch.ones(5)).keys() == {"step", "exp_avg", "exp_avg_sq"}

    def test_the_forecast_counts_what_is_held(self) -> None:
        weight = torch.ones(64, 1024)
        held = sum(value.nbytes for value in self.state_of(weight).values())
        forecast = shard_parts(0, weight.nbytes, FsdpConfig(), 1, state_dtype="int8")["optimizer"]
        assert math.isclose(forecast, held, rel_tol=1e-3)


def made(dtype: str) -> TrainingState:
    torch.manual_seed(0)
    optim = OptimConfig.model_validate({"lr": 0.1, "state_dtype": dtype})
    return TrainingState(nn.Linear(40, 4), optim, FsdpConfig(), rank=0, world_size=1, device=HOST)


def learn(state: TrainingState) -> None:
    state.optimizer.zero_grad()
    state.policy(torch.ones(2, 40)).pow(2).sum().backward()
    state.optimizer.step()


@SMALL
def test_a_run_goes_on_to_the_bit(tmp_path: Path, dtype: str) -> None:
    straight, resumed = made(dtype), made(dtype)
    learn(straight)
    straight.save(str(tmp_path))
    learn(straight)
    resumed.load(str(tmp_path))
    learn(resumed)
    expected = straight.policy.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.policy.state_dict().items())
    for mine, theirs in zip(resumed.optimizer.state.values(), straight.optimizer.state.values(), strict=True):
        assert {name: value.dtype for name, value in mine.items()} == {n: value.dtype for n, value in theirs.items()}
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@SMALL
def test_weights_that_no_loss_has_reached_are_saved(tmp_path: Path, dtype: str) -> None:
    straight, resumed = made(dtype), made(dtype)
    straight.optimizer.zero_grad()
    cast("torch.Tensor", straight.policy.bias).sum().backward()
    straight.optimizer.step()
    straight.save(str(tmp_path))
    resumed.load(str(tmp_path))
    assert torch.equal(resumed.policy.state_dict()["bias"], straight.policy.state_dict()["bias"])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the weights of two ranks, by case."""
    return run_two("tests.unit.recipes.training.small_moment_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_stay_equal_and_go_on_to_the_bit(results: list[dict[str, Any]], case: tuple[str, str]) -> None:
    first, second = (rank[str(case)] for rank in results)
    for name, weight in first["straight"].items():
        assert torch.equal(weight, second["straight"][name])
        assert torch.equal(weight, first["resumed"][name])
