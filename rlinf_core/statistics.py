"""Means and intervals of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

# The 97.5 % quantile of the normal distribution, for 95 % intervals.
_Z = 1.959963984540054


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of the share `right / count` (Wilson, JASA 22, 1927); (0, 1) for no trials.

    A trial may count as a fraction in `right`: fractions vary no more than outcomes of 0 and 1 with the same mean.
    """
    if not count:
        return 0.0, 1.0
    share, square = right / count, _Z * _Z / count
    center = (share + square / 2) / (1 + square)
    half = _Z * sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, center - half), min(1.0, center + half)
