"""Soft penalty for answers close to the length limit."""

from __future__ import annotations


def overlong_penalty(length: int, limit: int, margin: int) -> float:
    """Return a penalty from 0 down to -1, linear over the last `margin` tokens before the limit.

    Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).
    """
    if length <= limit - margin:
        return 0.0
    return max(-1.0, (limit - margin - length) / margin)
