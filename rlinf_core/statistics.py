"""Means and intervals of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

# The 97.5 % quantile of the normal distribution: intervals are of 95 %.
_Z = 1.959963984540054
# Those of Student's t for 1 to 30 degrees of freedom.
_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


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


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t, with the degrees of freedom rounded down to an integer.

    By the table up to 30, above by the first terms of its expansion around the normal quantile (Abramowitz and Stegun,
    26.7.5), which is exact to 1e-4 there.
    """
    whole = max(1, int(freedom))
    if whole <= len(_T):
        return _T[whole - 1]
    cube = _Z**3
    return _Z + (cube + _Z) / (4 * whole) + (5 * _Z**5 + 16 * cube + 3 * _Z) / (96 * whole**2)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right, 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374, eq. 1. k above `samples` counts
    as `samples`.
    """
    k = min(k, samples)
    return 1.0 - comb(samples - right, k) / comb(samples, k)
