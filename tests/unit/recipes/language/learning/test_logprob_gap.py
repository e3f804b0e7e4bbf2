"""The difference between engine and trainer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from recipes.language.learning.learner import LearnerSettings, TokenTargets
from recipes.language.learning.logprob_gap import GAP_LIMITS, logprob_gap
from recipes.training.sharding import ParallelStrategy

pytest.importorskip("transformers")

from dataclasses import replace

from tests.unit.recipes.language.learning.test_learner import learner
from tests.unit.recipes.language.tiny import plain_logprobs, random_batch, tiny_model

ALONE = ParallelStrategy(nn.Linear(1, 1), 1)


def test_figures_equal_a_loop() -> None:
    differences = [0.1, -0.3, 0.0, 0.02]
    result = logprob_gap(torch.tensor(differences), ALONE)
    assert result is not None
    assert result.mean == pytest.approx(sum(map(abs, differences)) / 4)
    assert result.largest == pytest.approx(0.3)
    assert result.k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 4)
    assert result.tokens == 4
    assert logprob_gap(torch.empty(0), ALONE) is None


def test_the_error_says_how_much_and_what_to_do() -> None:
    result = logprob_gap(torch.tensor([0.5, 0.1]), ALONE)
    assert result is not None
    error = result.error(GAP_LIMITS["fp32"], 3)
    assert "differ by up to 0.5, more than 0.01" in str(error)
    assert error.where == "step 3, 2 tokens, 0.3 on average"
    assert "chat template" in (error.help or "")


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_training_step_compares_the_weights_before_it(minibatches: int) -> None:
    batch = random_batch(4, groups=4)
    engine = plain_logprobs(tiny_model(), batch).detach()
    engine[0] += 0.25
    comparable = torch.ones(len(engine), dtype=torch.bool)
    comparable[-1] = False
    made = learner(tiny_model(), LearnerSettings(minibatches=minibatches, epochs=2, max_tokens=40), lr=0.5)
    advantages = torch.ones(len(engine))
    targets = TokenTargets(advantages=advantages, old_logprobs=engine, comparable=comparable)

    made.train(replace(batch, logprobs=engine, minibatches=batch.groups % minibatches), targets, 0)

    differences = made.differences
    if minibatches == 1:
        assert len(differences) == len(engine) - 1
        assert differences.abs().max().item() == pytest.approx(0.25, abs=1e-5)
    else:  # those of the first of two updates
        assert 0 < len(differences) < len(engine) - 1
    # Whatever came after the first update has no part.
    assert sum(difference.abs() > 1e-4 for difference in differences) <= 1
