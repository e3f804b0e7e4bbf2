"""Estimators of the Kullback-Leibler divergence of a policy from a reference, from samples of the policy.

With x ~ policy and d = log policy(x) - log reference(x), KL(policy || reference) = E[d]. John Schulman, "Approximating
KL divergence" (http://joschu.net/blog/kl-approx.html) names the estimators:

    k1 = d                   unbiased, of high variance, often negative
    k2 = d^2 / 2             biased, of low variance; its gradient is that of the divergence
    k3 = exp(-d) - 1 + d     unbiased, of low variance, never negative
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
# exp of more would overflow in float32 products; a ratio of e^20 means that the policies have nothing in common.
MAX_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Return the divergence at each sample.

    Args:
        logprobs: float, any shape; of the policy that made the samples.
        ref_logprobs: the same of the reference.
        estimator: k1, k2 or k3. k3 takes differences beyond 20 as 20.

    Returns:
        The shape of `logprobs`.

    Raises:
        ValueError: the estimator is not one of the three.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown divergence estimator `{estimator}`")
