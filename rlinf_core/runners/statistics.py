"""Means and intervals of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

# The 97.5 % quantile of the normal distribution: intervals are of 95 %.
_Z = 1.959963984540054


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, `right` of `count` (Wilson, JASA 22, 1927); (0, 1) of none.

    `right` may be a sum of shares of one trial each, which vary no more than outcomes of 0 and 1 with the same mean.
    """
    if not count:
        return 0.0, 1.0
    share, square = right / count, _Z * _Z / count
    center = (share + square / 2) / (1 + square)
    half = _Z * sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, center - half), min(1.0, center + half)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right, 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374, eq. 1. k above `samples` counts
    as `samples`.
    """
    k = min(k, samples)
    return 1.0 - comb(samples - right, k) / comb(samples, k)
