"""The losses gmpo, cispo and sapo train a model, and take the steps of `actor` where ratios are 1."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.integration.recipes.conftest import Train
from tests.integration.recipes.language.test_math_learns import metrics, train

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1200)]

LOSSES = ("gmpo", "cispo", "sapo")
BY_SEQUENCE = "algorithm.loss_agg_func=seq-mean-token-mean"
# Rewards differ by length: a model so small has few right answers.
DIFFERING = "reward.soft_overlong=6"


def test_losses_take_the_same_steps_at_ratio_one(train_math: Train) -> None:
    """One optimizer step a training step learns from tokens of the same weights: all gradients are the plain one."""
    small = (BY_SEQUENCE, DIFFERING, "algorithm.n_minibatches=1", "runner.max_steps=3")
    norms = {
        loss: [
            step.metrics["train/actor/grad_norm"] for step in train_math(f"algorithm.loss_type={loss}", *small).metrics
        ]
        for loss in ("actor", *LOSSES)
    }
    assert all(norm > 0 for norm in norms["actor"])
    for loss in LOSSES:
        assert norms[loss] == pytest.approx(norms["actor"], rel=1e-3), loss


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_learns_sums(tmp_path: Path, loss: str) -> None:
    run = train(tmp_path, "math_laptop", f"algorithm.loss_type={loss}", BY_SEQUENCE, "runner.max_steps=60")

    rewards = metrics(run, "rollout/reward")
    # The rise is 0.23 to 0.35; its standard error 0.023, as a step has 256 answers.
    assert statistics.fmean(rewards[-5:]) - statistics.fmean(rewards[:3]) >= 0.15
