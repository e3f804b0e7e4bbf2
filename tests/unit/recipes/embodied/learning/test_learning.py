"""Policies learn: environments, model, advantages and loss together, in the single-process loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.baselines.single_process_ppo import Outcome, arguments, run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(seed: int, **options: Any) -> Outcome:
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return run(arguments([*words, "--stop"]), seed)


def test_ppo_learns_to_reach() -> None:
    result = train(0, task="reach", steps=30, every=5, eval_envs=64)
    assert result.reached is not None
    assert result.success >= 0.9


def test_a_run_is_the_same_again() -> None:
    first, again = (train(3, task="reach", steps=2, every=1, target_return=99) for _ in range(2))
    assert first.mean_return == again.mean_return


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"adv_type": "grpo", "lr": 3e-4}], ids=["ppo", "grpo"])
def test_picking_is_learned(seed: int, options: dict[str, Any]) -> None:
    result = train(seed, steps=300, **options)
    assert result.reached is not None
