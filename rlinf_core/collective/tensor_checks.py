"""Checks of tensors that `send_tensor` and `recv_tensor` refuse, before the other side hears anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import PayloadError

if TYPE_CHECKING:
    import numpy as np
    import torch

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
    """Check that a dense tensor has the memory that it speaks of.

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
    raise PayloadError(f"a tensor `{tensor.dtype!s}{list(tensor.shape)}` has no memory of its own", why=why)


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
    """Check that every element of a buffer has a place of its own; a contiguous one need not be asked.

    Args:
        shape: its shape.
        strides: from one element to the next in each dimension.
        width: of one element, in the unit of the strides.

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
    """Return whether elements may share memory: whether some dimension's steps do not lead out of all smaller ones.

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
