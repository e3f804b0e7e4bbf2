"""The codec of tensors: their bytes out of band, for every dtype, device and stride.

No other file of the data plane imports torch; this one does when the process holds or receives a tensor.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlinf_core.collective.frame import HostPart, Part, copy_bytes
from rlinf_core.errors import PayloadError

if TYPE_CHECKING:
    import numpy as np
    import torch

# The checks for `send_tensor` and `recv_tensor` refuse tensors that their bytes, dtype and shape do not fully describe.


# Kinds of numpy dtypes that torch names alike, for example `float32`.
_NUMBERS = frozenset("biufc")
# `isbuiltin` of dtypes that a package adds, such as `bfloat16` of ml_dtypes: only their names tell them apart.
_ADDED = 2


@functools.lru_cache(maxsize=256)
def dtype_words(dtype: np.dtype[Any]) -> str:
    """Return a description of a dtype: arrays whose dtypes have the same description can exchange bytes.

    For numbers it is torch's name (`float32`), preceded by the byte order if that is not the machine's (`>float32`).
    Structured dtypes list every field, its offset in bytes, and the size of the whole.
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
    # The string includes the length of text and the unit of time.
    return dtype.str


_USE_SEND = "use `send`, and `recv` on the other side"


def check_tensor(tensor: torch.Tensor, operation: str) -> None:
    """Check that dtype, shape and bytes fully describe a tensor.

    Raises:
        PayloadError: it is sparse, nested, quantized, or on the device `meta`.
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
    """Check that dtype, shape and bytes fully describe an array.

    Raises:
        PayloadError: it holds object references, or has a mask.
    """
    numpy: Any = sys.modules["numpy"]
    if array.dtype.hasobject:
        raise PayloadError(
            f"`{operation}` takes an array of numbers, and this one is of dtype `{array.dtype}`", help=_USE_SEND
        )
    if type(array) is not numpy.ndarray and isinstance(array, numpy.ma.MaskedArray):
        raise PayloadError(f"`{operation}` takes no masked array", why="its mask would stay behind", help=_USE_SEND)


def check_separate(shape: Sequence[int], strides: Sequence[int], width: int = 1) -> None:
    """Check that the elements of a buffer do not share memory; those of contiguous buffers never do.

    Args:
        strides: the distance from one element to the next in each dimension.
        width: the size of one element, in the unit of the strides.

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

    Dimensions that interleave without overlap also count as shared; no slice or transposition makes them.
    """
    if 0 in shape:
        return False
    reach = width
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


class TensorPart(Part):
    """The bytes of a tensor, in C order. `copy`, if given, copies a tensor that is contiguous in host memory."""

    def __init__(self, tensor: torch.Tensor, copy: Callable[[torch.Tensor], object] | None = None) -> None:
        check_memory(tensor)
        self._tensor = tensor.detach()
        self._copy = copy
        self.nbytes = tensor.numel() * tensor.element_size()

    def view(self) -> memoryview | None:
        tensor = self._tensor
        if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        # The view does not keep the tensor alive: its user holds this part, and the part holds the tensor.
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(tensor.data_ptr())).cast("B")

    def copy_into(self, target: memoryview) -> None:
        import torch

        if not self.nbytes:
            return
        ready = self.view()
        if ready is not None and self._copy is None:
            copy_bytes(target, ready)
            return
        tensor = self._tensor
        there = torch.frombuffer(target, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
        if ready is not None and self._copy is not None:
            self._copy(there)
        else:
            # This also copies from an accelerator.
            there.copy_(tensor)


class CustomCopy:
    """A tensor to send with a copy function of the sender, which can use it while it is in the processor's cache.

    It arrives as a plain tensor. `copy` is not called if the bytes need no copy in host memory, for example on their
    way to another host.

    Args:
        tensor: the tensor.
        copy: copies the whole tensor into one of the same shape and dtype. It may be called once for each host.
    """

    def __init__(self, tensor: torch.Tensor, copy: Callable[[torch.Tensor], object]) -> None:
        self.tensor = tensor
        self.copy = copy


class TensorReducer:
    """The part of a pickler that takes every dense tensor out of band.

    It does not refer to the pickler: a cycle would keep the tensors alive.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._placeholders: dict[int, Part] = {}

    def keep(self, buffer: pickle.PickleBuffer) -> None:
        """Add the bytes of a buffer to the parts; the pickler's `buffer_callback`."""
        part = self._placeholders.pop(id(buffer), None)
        self._parts.append(HostPart(buffer.raw()) if part is None else part)

    def reduce(self, obj: Any) -> Any:
        """Return how to rebuild a tensor, or `NotImplemented`; the pickler's `reducer_override`."""
        import torch

        custom: CustomCopy | None = obj if type(obj) is CustomCopy else None
        if custom is not None:
            obj = custom.tensor
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        kind: type[torch.Tensor] = type(obj)
        dense = obj.layout is torch.strided and not obj.is_quantized and obj.device.type != "meta"
        if not dense or kind not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        # For a writable placeholder the stream says only "the next buffer", which may be any object when unpickled.
        placeholder = pickle.PickleBuffer(bytearray())
        self._placeholders[id(placeholder)] = TensorPart(obj, None if custom is None else custom.copy)
        device = (obj.device.type, obj.device.index)
        arguments = (placeholder, str(obj.dtype).removeprefix("torch."), tuple(obj.shape), device)
        reduced: tuple[Any, ...] = (rebuild_tensor, arguments)
        if kind is torch.nn.Parameter:
            reduced = (rebuild_parameter, (*arguments, obj.requires_grad))
        return (*reduced, vars(obj), None, None, set_attributes) if vars(obj) else reduced


class TorchPickler(pickle.Pickler):
    """A pickler with a `TensorReducer`."""

    def __init__(self, stream: io.BytesIO, tensors: TensorReducer) -> None:
        super().__init__(stream, protocol=5, buffer_callback=tensors.keep)
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        return self._tensors.reduce(obj)


def rebuild_tensor(
    buffer: Any, dtype: str, shape: tuple[int, ...], device: tuple[str, int | None]
) -> torch.Tensor | np.ndarray[Any, Any]:
    """Return the tensor with the bytes `buffer`, on a device of this process; a numpy array if torch is missing.

    Raises:
        PayloadError: torch is missing, and so is numpy or its dtype of this name.
    """
    try:
        import torch
    except ImportError:
        return _rebuild_array(buffer, dtype, shape)
    kind = cast("torch.dtype", getattr(torch, dtype))
    if memoryview(buffer).nbytes:
        flat = torch.frombuffer(buffer, dtype=kind)
    else:
        flat = torch.empty(0, dtype=kind)
    tensor = flat.reshape(shape)
    return tensor if device[0] == "cpu" else tensor.to(_local_device(torch, *device))


def rebuild_parameter(
    buffer: Any, dtype: str, shape: tuple[int, ...], device: tuple[str, int | None], requires_grad: bool
) -> object:
    """Return a `torch.nn.Parameter`, see `rebuild_tensor`."""
    data = rebuild_tensor(buffer, dtype, shape, device)
    torch = sys.modules.get("torch")
    return data if torch is None else torch.nn.Parameter(data, requires_grad)


def set_attributes(tensor: object, attributes: dict[str, Any]) -> None:
    """Set the attributes that a program gave to a tensor before it was sent."""
    vars(tensor).update(attributes)


def _local_device(torch: Any, kind: str, index: int | None) -> torch.device:
    """Return the device of this index if it exists, else the current device of its kind, else the CPU.

    Each process may see its own accelerator as number 0.
    """
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return torch.device("cpu")
    return torch.device(kind, index if index is not None and index < module.device_count() else module.current_device())


def _rebuild_array(buffer: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    try:
        import numpy as np
    except ImportError:
        raise PayloadError(
            f"a tensor arrived, but `{sys.executable}` has neither torch nor numpy", help="install one of them there"
        ) from None
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    # Refuse dtypes that packages add to numpy: the result must not depend on what this process has imported.
    if kind is None or kind.isbuiltin != 1:
        raise PayloadError(
            f"a tensor of dtype `{dtype}` arrived, but `{sys.executable}` has no torch, and numpy has no such dtype",
            help="install torch there, or send `float32`",
        )
    return np.frombuffer(buffer, dtype=kind).reshape(shape)


class TensorTarget:
    """A buffer that `recv_tensor` fills: a torch tensor or a numpy array.

    Attributes:
        dtype: the description of its dtype, see `dtype_words`; the same in torch and numpy.
    """

    def __init__(self, buffer: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Take a buffer.

        Raises:
            PayloadError: it is no tensor or array, or cannot be filled: it is read-only, has no memory of its own, or
                its elements share memory.
        """
        self.buffer = buffer
        self._tensor = _as_tensor(buffer)
        self.nbytes: int
        self.dtype: str
        # Whether the buffer is contiguous in host memory, so that received bytes can be copied there unchanged.
        self._plain: bool
        if self._tensor is not None:
            tensor = self._tensor
            check_tensor(tensor, "recv_tensor")
            check_memory(tensor)
            contiguous = tensor.is_contiguous()
            if not contiguous:
                check_separate(tensor.shape, tensor.stride())
            self._plain = contiguous and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg())
            self.nbytes = tensor.numel() * tensor.element_size()
            self.dtype = str(tensor.dtype).removeprefix("torch.")
        else:
            numpy = sys.modules.get("numpy")
            if numpy is None or not isinstance(buffer, numpy.ndarray):
                raise PayloadError(f"`recv_tensor` fills a tensor or an array, not a `{type(buffer).__name__}`")
            array = cast("np.ndarray[Any, Any]", buffer)
            check_array(array, "recv_tensor")
            self._plain = array.flags.c_contiguous
            if not array.flags.writeable:
                raise PayloadError(
                    "`recv_tensor` cannot fill a read-only array", help="receive into a copy: `array.copy()`"
                )
            if not self._plain:
                check_separate(array.shape, array.strides, array.itemsize)
            # Some subclasses, such as `numpy.matrix`, cannot be flattened to one dimension.
            self._array = array.view(numpy.ndarray)
            self.nbytes = array.nbytes
            self.dtype = dtype_words(array.dtype)
        self.shape = tuple(int(size) for size in buffer.shape)

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)

    def view(self) -> memoryview | None:
        """Return the memory to fill if it is contiguous in host memory, else None."""
        if not self._plain:
            return None
        if self._tensor is not None:
            return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self._tensor.data_ptr())).cast("B")
        return _bytes_of(self._array)

    def fill(self, source: memoryview) -> None:
        """Copy the bytes `source` into the buffer."""
        if not self.nbytes:
            return
        target = self.view()
        if target is not None:
            copy_bytes(target, source)
        elif self._tensor is not None:
            import torch

            flat = torch.frombuffer(source, dtype=self._tensor.dtype)
            # A tensor made in inference mode can only be changed in inference mode.
            with torch.no_grad(), torch.inference_mode(self._tensor.is_inference()):
                self._tensor.detach().copy_(flat.view(self.shape))
        else:
            import numpy as np

            array = self._array
            np.copyto(array, np.frombuffer(source, dtype=array.dtype).reshape(self.shape))


def tensor_parts(tensor: torch.Tensor | np.ndarray[Any, Any]) -> tuple[bytes, Part]:
    """Return dtype and shape as text, and the bytes, of one tensor for `send_tensor`.

    Raises:
        PayloadError: it is neither a tensor nor an array, or is sparse, quantized, or of objects.
    """
    ours = _as_tensor(tensor)
    if ours is not None:
        check_tensor(ours, "send_tensor")
        words = describe(str(ours.dtype).removeprefix("torch."), tuple(ours.shape))
        return words.encode(), TensorPart(ours)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(tensor, numpy.ndarray):
        raise PayloadError(
            f"`send_tensor` takes a tensor or an array of numbers, not a `{type(tensor).__name__}`", help="use `send`"
        )
    check_array(cast("np.ndarray[Any, Any]", tensor), "send_tensor")
    array = cast("np.ndarray[Any, Any]", numpy.ascontiguousarray(tensor))
    return describe(dtype_words(array.dtype), tuple(array.shape)).encode(), HostPart(_bytes_of(array))


def _as_tensor(obj: object) -> torch.Tensor | None:
    """Return `obj` if it is a tensor, else None; a process that has not imported torch has no tensors."""
    module = sys.modules.get("torch")
    return cast("torch.Tensor", obj) if module is not None and isinstance(obj, module.Tensor) else None


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    # Elements may be empty text, of zero bytes, which cannot be viewed as `uint8`.
    return memoryview(cast("Any", array.reshape(-1).view("uint8"))) if array.nbytes else memoryview(b"")


def describe(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a dtype and a shape as text: `float32[4, 2]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"
