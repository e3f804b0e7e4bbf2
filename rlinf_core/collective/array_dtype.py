"""The dtypes of numpy arrays, in words that two processes can compare."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# Kinds whose names, as in `float32`, torch has as well.
_NUMBERS = frozenset("biufc")
# Types that a package adds, as ml_dtypes does `bfloat16`: only their names tell them apart.
_ADDED = 2


@functools.lru_cache(maxsize=256)
def dtype_words(dtype: np.dtype[Any]) -> str:
    """Return what the bytes of an array mean: two dtypes have the same words if each can take the other's bytes as
    they are.

    The name that torch gives it where the numbers are in this machine's byte order, as in `float32`, else with the
    order before it, as in `>float32`. Structured dtypes name every field, its place and the whole size.
    """
    fields: Any = dtype.fields
    if fields is not None:
        placed = [(name, *fields[name][:2]) for name in dtype.names or ()]
        inner = ", ".join(f"{name!r}: {dtype_words(kind)} at {offset}" for name, kind, offset in placed)
        return f"{{{inner}}} of {dtype.itemsize} bytes"
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{shape} of {dtype_words(base)}"
    if dtype.kind in _NUMBERS or dtype.isbuiltin == _ADDED:
        return dtype.name if dtype.isnative else f"{dtype.byteorder}{dtype.name}"
    # With the length of text, and the unit of time.
    return dtype.str
