"""Estimators of a divergence."""

from __future__ import annotations

import math
from typing import cast, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.algorithms.loss_inputs import KlEstimator, kl_estimate

log = st.floats(-9, 0)


@given(log, log)
def test_estimators_equal_their_formulas(policy: float, reference: float) -> None:
    d = policy - reference
    a, b = torch.tensor([policy], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    assert kl_estimate(a, b, "k1").item() == pytest.approx(d, abs=1e-9)
    assert kl_estimate(a, b, "k2").item() == pytest.approx(d * d / 2, abs=1e-9)
    assert kl_estimate(a, b, "k3").item() == pytest.approx(math.exp(-d) - 1 + d, abs=1e-6)
    assert kl_estimate(a, b, "k3").item() >= 0


def test_expectations_are_the_divergence() -> None:
    """Over all outcomes of a small distribution: k1 and k3 exactly, k2 nearly; the gradient of k2 exactly."""
    logits = torch.tensor([0.2, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.0, 0.1], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    probabilities = logprobs.exp()
    exact = (probabilities * (logprobs - reference)).sum()
    for name in get_args(KlEstimator):
        mean = (probabilities * kl_estimate(logprobs, reference, cast("KlEstimator", name))).sum()
        assert mean.item() == pytest.approx(exact.item(), abs=1e-12 if name != "k2" else 5e-3)
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled = (probabilities.detach() * kl_estimate(logprobs, reference, "k2")).sum()
    (result,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(result, expected)


def test_k3_stays_finite() -> None:
    x = torch.tensor([-200.0], requires_grad=True)
    value = kl_estimate(x, torch.zeros(1), "k3")
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), cast("KlEstimator", "k4"))
