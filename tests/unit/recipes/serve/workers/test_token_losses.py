"""Losses of the service, against loops over single tokens that were written from their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recipes.serve.values import LOSS_INPUTS
from recipes.serve.workers.datum_packing import LOSSES

LOW, HIGH, BETA = 0.9, 1.1, 0.3


def expected(loss: str, new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Return the loss of one sequence, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    active = [place for place in range(len(new)) if advantages[place] != 0]
    mean = sum(float((new[place] - old[place]).detach()) for place in active) / len(active)
    for place in range(len(new)):
        ratio, advantage = torch.exp(new[place] - old[place]), advantages[place]
        if loss == "cross_entropy":
            total = total - weights[place] * new[place]
        elif loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss == "ppo":
            clipped = min(max(float(ratio), LOW), HIGH) * float(advantage)
            total = total - (ratio * advantage if float(ratio * advantage) <= clipped else clipped)
        elif loss == "cispo":
            total = total - min(max(float(ratio.detach()), LOW), HIGH) * advantage * new[place]
        elif loss == "dro":
            total = total - (new[place] * advantage - BETA / 2 * (new[place] - old[place]) ** 2)
        else:
            whole = math.exp(mean)
            clipped = min(max(whole, LOW), HIGH) * float(advantage)
            token = whole * torch.exp(new[place] - float(new[place]))
            total = total - (token * advantage if whole * float(advantage) <= clipped else clipped)
    return total


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_match_a_loop(loss: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(9, generator=generator, dtype=torch.float64) * 3
    old = new + 0.3 * torch.randn(9, generator=generator, dtype=torch.float64)
    advantages = torch.randn(9, generator=generator, dtype=torch.float64)
    advantages[:2] = 0
    weights = torch.randn(9, generator=generator, dtype=torch.float64)
    mine, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    inputs = {"weights": weights, "logprobs": old, "advantages": advantages}
    settings = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA}
    value, right = LOSSES[loss](mine, inputs, settings), expected(loss, theirs, old, advantages, weights)
    value.backward()
    right.backward()
    torch.testing.assert_close(value, right)
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_losses_and_their_inputs_have_the_same_names() -> None:
    assert set(LOSSES) == set(LOSS_INPUTS)


def test_thresholds_of_tokens_replace_those_of_the_loss() -> None:
    new, old = torch.log(torch.tensor([2.0, 2.0])), torch.zeros(2)
    inputs = {"logprobs": old, "advantages": torch.ones(2), "clip_high_threshold": torch.tensor([1.5, 5.0])}
    value = LOSSES["ppo"](new, inputs, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    assert float(value) == pytest.approx(-(1.5 + 2.0))


def test_gspo_mask_chooses_the_tokens_of_the_ratio() -> None:
    new, old = torch.tensor([0.1, -2.0]), torch.tensor([0.0, 0.0])
    inputs = {"logprobs": old, "advantages": torch.tensor([1.0, 0.0]), "sequence_ratio_mask": torch.tensor([1.0, 0.0])}
    value = LOSSES["gspo"](new, inputs, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    assert float(value) == pytest.approx(-math.exp(0.1))
