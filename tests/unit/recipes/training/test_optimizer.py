"""Learning rates over the steps of a run, and settings that a checkpoint does not override."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from recipes.sections.actor import OptimConfig, ValueOptimConfig
from recipes.training.optim.optimizer import EagerAdamW, apply_settings, learning_rate_factor, make_optimizer

# One training step of the actor's state, and which of torch's slow modules it has imported.
START = """
import sys, torch
import recipes.embodied.workers.actor_worker
from recipes.sections.actor import FsdpConfig, OptimConfig, ValueOptimConfig
from recipes.training.state.training_state import TrainingState
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


def test_constant_is_one_throughout() -> None:
    assert factors(1, 7, 12) == [1, 1, 1]
    assert factors(1, 10**6, last_step=None) == [1, 1]


def test_warmup_rises_in_a_line() -> None:
    assert factors(1, 2, 3, 4, 5, lr_warmup_steps=3) == [0.25, 0.5, 0.75, 1, 1]


def test_linear_falls_by_equal_steps_and_no_step_learns_nothing() -> None:
    assert factors(1, 4, 7, 12, lr_scheduler="linear") == [1, 0.75, 0.5, round(1 / 12, 6)]
    # After the warmup there is less left.
    assert factors(3, 4, 8, 12, lr_scheduler="linear", lr_warmup_steps=2) == [1, 0.9, 0.5, 0.1]


def test_cosine_is_torch_s_own() -> None:
    weights = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(weights, T_max=12, eta_min=0.1)
    wanted: list[float] = []
    for _ in range(12):
        wanted.append(schedule.get_last_lr()[0])
        weights.step()
        schedule.step()
    assert factors(*range(1, 13), lr_scheduler="cosine", min_lr_ratio=0.1) == pytest.approx(wanted, abs=1e-6)


def test_total_training_steps_is_the_end_and_the_minimum_holds() -> None:
    assert factors(1, 3, 5, 90, lr_scheduler="linear", total_training_steps=4, min_lr_ratio=0.2, last_step=90) == [
        1,
        0.6,
        0.2,
        0.2,
    ]


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
