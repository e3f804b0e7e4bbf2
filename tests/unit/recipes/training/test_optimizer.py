"""Learning rates, settings that a checkpoint does not override, and moments kept in few bits."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from recipes.sections.actor import FsdpConfig, OptimConfig, ValueOptimConfig
from recipes.training.optimizer import (
    ByteStateAdamW,
    EagerAdamW,
    apply_settings,
    learning_rate_factor,
    make_optimizer,
    round_at_random,
)
from recipes.training.weights.training_state import TrainingState
from recipes.training.without_memory import shard_parts

# One training step of the actor's state, and which of torch's slow modules it has imported.
START = """
import sys, torch
import recipes.embodied.workers.actor_worker
from recipes.sections.actor import FsdpConfig, OptimConfig, ValueOptimConfig
from recipes.training.weights.training_state import TrainingState
state = TrainingState(
    torch.nn.Linear(3, 2), OptimConfig(), FsdpConfig(), rank=0, world_size=1, device=torch.device("cpu")
)
state.optimizer.zero_grad()
state.policy(torch.ones(1, 3)).sum().backward()
state.strategy.clip_gradients(1.0, state.strategy.gradient_norm())
state.optimizer.step()
slow = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "sympy")
print([name for name in slow if name in sys.modules])
"""


def factors(*steps: int, last_step: int | None = 12, **keys: Any) -> list[float]:
    config = OptimConfig.model_validate(keys)
    return [round(learning_rate_factor(config, step, last_step), 6) for step in steps]


LINEAR = {"lr_scheduler": "linear"}
SHORT = {**LINEAR, "total_training_steps": 4, "min_lr_ratio": 0.2}


@pytest.mark.parametrize(
    ("steps", "last_step", "keys", "expected"),
    [
        pytest.param((1, 7, 12), 12, {}, [1, 1, 1], id="constant"),
        pytest.param((1, 10**6), None, {}, [1, 1], id="constant without an end"),
        pytest.param((1, 2, 3, 4, 5), 12, {"lr_warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1], id="warmup in a line"),
        pytest.param((1, 4, 7, 12), 12, LINEAR, [1, 0.75, 0.5, round(1 / 12, 6)], id="no step learns nothing"),
        pytest.param((3, 4, 8, 12), 12, {**LINEAR, "lr_warmup_steps": 2}, [1, 0.9, 0.5, 0.1], id="after the warmup"),
        pytest.param((1, 3, 5, 90), 90, SHORT, [1, 0.6, 0.2, 0.2], id="total steps, and the minimum holds"),
    ],
)
def test_rates_rise_and_fall(
    steps: tuple[int, ...], last_step: int | None, keys: dict[str, Any], expected: list[float]
) -> None:
    assert factors(*steps, last_step=last_step, **keys) == expected


def test_cosine_is_torch_s_own() -> None:
    weights = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(weights, T_max=12, eta_min=0.1)
    wanted: list[float] = []
    for _ in range(12):
        wanted.append(schedule.get_last_lr()[0])
        weights.step()
        schedule.step()
    assert factors(*range(1, 13), lr_scheduler="cosine", min_lr_ratio=0.1) == pytest.approx(wanted, abs=1e-6)


def test_the_file_decides_over_what_a_checkpoint_said() -> None:
    policy = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    old = make_optimizer(policy, OptimConfig(lr=1e-3, weight_decay=0.5))
    new = make_optimizer(policy, ValueOptimConfig(lr=1e-4, value_lr=1e-2))
    new.load_state_dict(old.state_dict())
    apply_settings(new, ValueOptimConfig(lr=1e-4, value_lr=1e-2, adam_beta1=0.5), 0.5)
    assert [group["lr"] for group in new.param_groups] == [5e-5, 5e-3]
    assert [group["weight_decay"] for group in new.param_groups] == [0, 0]
    assert new.param_groups[0]["betas"] == (0.5, 0.999)


def test_start_imports_no_compiler_and_no_checkpointing() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_eager_optimizer_is_torch_s_own_and_takes_its_state() -> None:
    weights = [nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)) for _ in range(2)]
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "fused": True}
    ours, theirs = EagerAdamW([weights[0]], **settings), torch.optim.AdamW([weights[1]], **settings)
    for step in range(6):
        if step == 3:
            # Loading shares tensors with what is loaded.
            ours.load_state_dict(deepcopy(theirs.state_dict()))
            theirs.load_state_dict(deepcopy(ours.state_dict()))
        for weight, optimizer in zip(weights, (ours, theirs), strict=True):
            optimizer.zero_grad()
            assert weight.grad is None
            (weight.sin() ** 2).sum().backward()
            optimizer.step()
        assert torch.equal(weights[0], weights[1])
    assert weights[0].requires_grad
    assert isinstance(ours.step(lambda: 0.5), float)


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
