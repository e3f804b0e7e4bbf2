"""Boolean columns, in the types that data sets use for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.names import MODES
from recipes.training.arrays import Array


def truths(values: Array, name: str, place: Callable[[int], str]) -> NDArray[np.bool_]:
    """Return a column as bool [N].

    Args:
        values: booleans, or the numbers 0 and 1.
        name: the name of the column.
        place: returns the location of a row, for errors.

    Raises:
        DatasetError: a value is another number.
    """
    if name.rpartition("/")[2] in MODES:
        return values == 1
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        row = int(wrong[0])
        raise DatasetError(
            f"`{name}` is {values[row]:g}; it must be 1 (true) or 0 (false)",
            where=place(row),
            help="correct the column, or name another one in `data.columns`",
        )
    return values.astype(np.bool_)
