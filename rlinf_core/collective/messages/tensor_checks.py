"""The checks of `send_tensor` and `recv_tensor`: tensors that are more, or less, than their bytes are refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import PayloadError

if TYPE_CHECKING:
    import numpy as np
    import torch

# Kinds whose names, as in `float32`, torch has as well.
_NUMBERS = frozenset("biufc")
# Types that a package adds, as ml_dtypes does `bfloat16`: only their names tell them apart.
_ADDED = 2


@functools.lru_cache(maxsize=256)
def dtype_words(dtype: np.dtype[Any]) -> str:
    """Return the meaning of an array's bytes: arrays whose dtypes have the same description can exchange bytes.

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


_USE_SEND = "use `send`, and `recv` on the other side"


def check_tensor(tensor: torch.Tensor, operation: str) -> None:
    """Check that a tensor is no more than its dtype, its shape and its bytes.

    Raises:
        PayloadError: it is sparse, nested, quantized, or on no device.
    """
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "nested" if tensor.is_nested else f"of layout `{tensor.layout}`"
        raise PayloadError(f"`{operation}` takes dense tensors, and this one is {what}", help=_USE_SEND)
    if tensor.is_quantized:
        why = "what its numbers stand for is not in its bytes"
        raise PayloadError(f"`{operation}` takes no quantized tensor", why=why, help=_USE_SEND)
    if tensor.is_meta:
        raise PayloadError(f"`{operation}` takes tensors with data, and this one is on the device `meta`")


def check_memory(tensor: torch.Tensor) -> None:
    """Check that a dense tensor has its own memory.

    Raises:
        PayloadError: its storage was freed, or it is a wrapper around other tensors.
    """
    if not tensor.numel():
        return
    torch: Any = sys.modules["torch"]
    kind = type(tensor)
    if not tensor.untyped_storage().nbytes():
        why = "its storage was freed, as sharded training does between uses"
    elif kind is torch.Tensor or _address(tensor):
        return
    else:
        why = f"a `{kind.__name__}` stands for other tensors"
    raise PayloadError(f"a tensor `{tensor.dtype!s}{list(tensor.shape)}` does not own its memory", why=why)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def check_array(array: np.ndarray[Any, Any], operation: str) -> None:
    """Check that an array is no more than its dtype, its shape and its bytes.

    Raises:
        PayloadError: it holds references, or a mask.
    """
    numpy: Any = sys.modules["numpy"]
    if array.dtype.hasobject:
        raise PayloadError(
            f"`{operation}` takes an array of numbers, and this one is of dtype `{array.dtype}`", help=_USE_SEND
        )
    if type(array) is not numpy.ndarray and isinstance(array, numpy.ma.MaskedArray):
        raise PayloadError(f"`{operation}` takes no masked array", why="its mask would stay behind", help=_USE_SEND)


def check_separate(shape: Sequence[int], strides: Sequence[int], width: int = 1) -> None:
    """Check that the elements of a buffer do not share memory; contiguous ones never do.

    Args:
        strides: the distance from one element to the next in each dimension.
        width: the width of one element, in the unit of the strides.

    Raises:
        PayloadError: elements share memory.
    """
    if share_memory(shape, strides, width):
        raise PayloadError(
            "`recv_tensor` cannot fill a buffer whose elements share memory",
            why=f"its shape is {list(shape)}, its strides are {list(strides)}",
            help="receive into a buffer that was not expanded",
        )


def share_memory(shape: Sequence[int], strides: Sequence[int], width: int = 1) -> bool:
    """Return whether elements may share memory: whether some stride is less than the span of the smaller strides.

    Dimensions that interlock without meeting, which no slice or transposition makes, count as shared.
    """
    if 0 in shape:
        return False
    reach = width
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False
