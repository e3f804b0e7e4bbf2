"""Actions as OpenVLA's tokens, and back: bins of numbers from -1 to 1, and the sign of the gripper."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recipes.training.arrays import Array

Gripper = Literal["as_is", "opening"]


def tokens_of(normalized: Array, bins: int) -> NDArray[np.int64]:
    """Return tokens int64 of normalized numbers, of the same shape: 0 to `bins` - 1, larger ones for smaller numbers.

    Numbers beyond -1 and 1 are clipped. Of B bins there are B edges, from -1 to 1 in even steps; token B - k stands for
    a number that is not below the edge k, counted from 1, and below the next one.
    """
    edges = np.linspace(-1, 1, bins)
    return bins - np.digitize(np.clip(normalized, -1, 1), edges)


def numbers_of(tokens: Array, bins: int) -> NDArray[np.float64]:
    """Return the normalized numbers that tokens 0 to `bins` - 1 stand for: the middle between two edges.

    B edges have B - 1 middles: the number 1 alone is beyond the last edge, and is read as the last middle.
    """
    edges = np.linspace(-1, 1, bins)
    middles = (edges[:-1] + edges[1:]) / 2
    return middles[np.clip(bins - 1 - tokens, 0, bins - 2)]


def to_gripper(actions: Array, gripper: Gripper) -> Array:
    """Return actions [..., A] with the last number as the environment takes it.

    opening: it is predicted from 0 (closed) to 1 (open), and taken as -1 (open) or 1 (closed).
    """
    if gripper == "as_is":
        return actions
    opening = actions[..., -1:]
    return np.concatenate((actions[..., :-1], -np.sign(2 * opening - 1)), axis=-1)


def from_gripper(actions: Array, gripper: Gripper) -> Array:
    """Return an environment's actions [..., A] with the last number as OpenVLA learns it: see `to_gripper`."""
    if gripper == "as_is":
        return actions
    return np.concatenate((actions[..., :-1], (1 - actions[..., -1:]) / 2), axis=-1)
