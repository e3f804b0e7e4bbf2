"""Arrays of numpy: the type of those whose dtype the code that handles them does not depend on, and files of them."""

from __future__ import annotations

import io
import os
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlinf_core.foreign.budget import Budget
from rlinf_core.foreign.files import open_regular

# The dtype stays open: `NDArray[np.generic]` would refuse arithmetic, and an observation may be text.
Array: TypeAlias = NDArray[Any]


def read_arrays(file: bytes | str | os.PathLike[str]) -> dict[str, Array]:
    """Return the arrays of an npz file by name, once what they claim is added up.

    Args:
        file: the path of a file, or its bytes.

    Raises:
        OSError: it cannot be read.
        ValueError, zipfile.BadZipFile: it is no such file, claims more than its budget, or holds Python's objects.
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
