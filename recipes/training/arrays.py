"""numpy arrays: a type for any dtype, npz files, and detection of non-finite values.

Imports numpy only: interpreters of environments need no torch. Owners of tensors test them with `torch.isfinite` and
raise `NonFiniteError`.
"""

from __future__ import annotations

import io
import os
from math import isfinite
from typing import IO, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlinf_core import RLinfError
from rlinf_core.foreign.budget import Budget
from rlinf_core.foreign.files import open_regular

# The dtype stays open: `NDArray[np.generic]` would refuse arithmetic, and an observation may be text.
Array: TypeAlias = NDArray[Any]


def read_arrays(file: bytes | str | os.PathLike[str]) -> dict[str, Array]:
    """Return the arrays of an npz file by name, after checking their claimed sizes against a budget.

    Args:
        file: the path of a file, or its bytes.

    Raises:
        OSError: the file cannot be read. ValueError, zipfile.BadZipFile: the file is not an npz file, claims more than
            its budget, or holds Python objects.
    """
    with io.BytesIO(file) if isinstance(file, bytes) else open_regular(file) as opened:
        return _arrays(opened)


def _arrays(opened: IO[bytes]) -> dict[str, Array]:
    budget = Budget.of_size(opened.seek(0, 2))
    opened.seek(0)
    with np.load(opened, allow_pickle=False) as archive:
        for entry in archive.zip.infolist():
            budget.take(entry.file_size, f"`{entry.filename}`")
        try:
            return {name: archive[name] for name in archive.files}
        except MemoryError as error:
            raise ValueError(f"an array claims more than its file holds: {error}") from None


# Advice for any non-finite tensor in training.
REMEDY = (
    "lower `actor.optim.lr` or `actor.optim.clip_grad`; a checkpoint saved before this step is unaffected:"
    " `runner.resume_dir=auto` resumes from the newest; `runner.on_nonfinite=skip` skips such updates"
)

# Values of `runner.on_nonfinite`: end the run with an error, or skip the affected data and continue.
OnNonFinite: TypeAlias = Literal["stop", "skip"]


class NonFiniteError(RLinfError):
    """A tensor of the training data or of the optimization holds a NaN or an infinity.

    Args:
        tensor: the name of the tensor, as in `reward`, `observation states`, `train/actor/policy_loss`.
        value: one of its non-finite values.
        where: the step and the place, as in `step 12, environment 3` or `step 12, ActorGroup:0`.
        help: the remedy.
    """

    code = "not-finite"

    def __init__(self, tensor: str, value: float, where: str, help: str | None = None) -> None:
        super().__init__(f"`{tensor}` is {value:g}, not a finite number", where=where, help=help)
        self.tensor = tensor


def nonfinite_rows(values: Array) -> NDArray[np.bool_]:
    """Return a mask of the rows of an array that hold a NaN or an infinity.

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
    # One pass, for small arrays of every step: a sum of squares is finite only if all numbers are. It may overflow
    # although they are.
    return isfinite(np.vdot(values, values)) or bool(np.isfinite(values).all())
