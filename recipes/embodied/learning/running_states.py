"""Running mean and standard deviation of states, `algorithm.normalize_observations`.

What is kept of all rows so far is their number, mean and deviation; those of a step are joined to them by the formula
of Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances" (1979), eq. 1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.training.typed_tensors import floats
from rlinf_core import ConfigError


def check_running(normalization: Normalization) -> None:
    """Check that statistics a policy came with may keep running.

    Raises:
        ConfigError: they are of demonstrations, which its weights were trained with.
    """
    if normalization.rows is None and normalization != Normalization():
        raise ConfigError(
            "`algorithm.normalize_observations` would change the statistics that the policy was trained with",
            why="they came with its weights, and are not running ones",
            help="remove `algorithm.normalize_observations`",
        )


def alone(value: Tensor) -> Tensor:
    """Return the value unchanged: the sum over a single actor."""
    return value


def with_states(
    normalization: Normalization,
    states: Tensor,
    counted: Tensor,
    reduce_sum: Callable[[Tensor], Tensor] | None = None,
    *,
    raw: bool = False,
) -> Normalization:
    """Return the normalization of the rows so far and those of a step.

    Args:
        normalization: the normalization by which `states` were normalized; without statistics they were not.
        states: float [..., S], of a step.
        counted: bool [...], which of them are rows of an episode.
        reduce_sum: sums a tensor over actors; None for a single actor.
        raw: the states are as observed, and were not normalized.
    """
    rows = states[counted].double().cpu()
    old, before = normalization.states, normalization.rows or 0
    if old is not None and not raw:
        shift, scale, offset = old.affine(normalization.scheme, normalization.epsilon)
        rows = (rows + offset) * torch.from_numpy(scale).double() + torch.from_numpy(shift).double()  # pyright: ignore[reportUnknownMemberType]
    add_up = reduce_sum or alone
    count = round(float(add_up(torch.tensor(float(len(rows)), dtype=torch.float64))))
    if not count:
        return normalization
    mean = add_up(rows.sum(dim=0)) / count
    squares = add_up((rows - mean).square().sum(dim=0))
    total = before + count
    if old is not None:
        old_mean, old_deviation = (torch.tensor(row, dtype=torch.float64) for row in (old.mean, old.std))
        away = mean - old_mean
        mean = old_mean + away * (count / total)
        squares = squares + old_deviation.square() * before + away.square() * (before * count / total)
    deviation = (squares / total).sqrt()
    return replace(normalization, states=Statistics.of_moments(floats(mean), floats(deviation)), rows=total)
