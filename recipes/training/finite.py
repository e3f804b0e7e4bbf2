"""Detection of NaN and infinite values, with one wording for rewards, observations, losses and gradients.

numpy only: interpreters of environments need no torch. A tensor is tested with `torch.isfinite` by its owner, who then
raises `NonFiniteError`.
"""

from __future__ import annotations

from math import isfinite
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.training.arrays import Array
from rlinf_core import RLinfError

# Advice for every tensor of the training that is not finite.
REMEDY = (
    "lower `actor.optim.lr` or `actor.optim.clip_grad`; a checkpoint saved before this step is unaffected:"
    " `runner.resume_dir=auto` resumes from the newest; `runner.on_nonfinite=skip` skips such updates"
)

# Values of `runner.on_nonfinite`: end the run with an error, or skip the affected data and continue.
OnNonFinite: TypeAlias = Literal["stop", "skip"]


class NonFiniteError(RLinfError):
    """A tensor of the training data or of the optimization holds a NaN or an infinity.

    Args:
        tensor: what it is, as in `reward`, `observation states`, `train/actor/policy_loss`.
        value: one of its values that are not finite.
        where: the step and the place, as in `step 12, environment 3` or `step 12, ActorGroup:0`.
        help: what the reader can do.
    """

    code = "not-finite"

    def __init__(self, tensor: str, value: float, where: str, help: str | None = None) -> None:
        super().__init__(f"`{tensor}` is {value:g}, not a finite number", where=where, help=help)
        self.tensor = tensor


def nonfinite_rows(values: Array) -> NDArray[np.bool_]:
    """Return which rows of an array hold a NaN or an infinity.

    Args:
        values: [B, ...]; integers and booleans are always finite.

    Returns:
        bool [B].
    """
    if all_finite(values):
        return np.zeros(len(values), np.bool_)
    return ~np.all(np.isfinite(values).reshape(len(values), -1), axis=1)


def all_finite(values: Array) -> bool:
    """Return whether an array holds no NaN and no infinity; integers, booleans and texts hold none."""
    if values.dtype.kind != "f":
        return True
    # One pass over small arrays of every step: a sum of squares is finite only where all numbers are. It may be too
    # large for its type where they are.
    return isfinite(np.vdot(values, values)) or bool(np.isfinite(values).all())
