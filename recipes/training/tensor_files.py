"""Safetensors files, read row by row and written tensor by tensor.

The package safetensors maps whole files into memory, so that the pages it reads count as this process's memory, and
copies all tensors once more to write them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from recipes.sections.model_folders import weight_files, weights_header
from rlinf_core.foreign.budget import Budget
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA: Final = "__metadata__"
_ABOUT: Final = MappingProxyType({"format": "pt"})
_MOST_DIMENSIONS: Final = 64
# Dimensions along which a tensor may be cut into parts.
_MOST_CUT: Final = 8
# Bytes that `StoredTensor.copy_to` reads at a time.
_PIECE: Final = 64 << 20


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        path: the path of the file.
        begin: the offset of its first byte.
        dtype, shape: its stored type and shape.
    """

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, start: int, count: int) -> Tensor:
        """Return rows of the tensor; a 0-D tensor has one row.

        Raises:
            OSError: the file cannot be read, or is truncated.
        """
        row = self.shape[1:]
        made = torch.empty((count, *row), dtype=self.dtype)
        if not made.numel():
            return made
        target = memoryview(cast("Any", made.view(-1).view(torch.uint8).numpy()))
        place = self.begin + start * math.prod(row) * self.dtype.itemsize
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while target:
                read = os.preadv(descriptor, [target[: 1 << 30]], place)
                if not read:
                    raise OSError(f"`{self.path}` ends before its tensors do")
                target, place = target[read:], place + read
        finally:
            os.close(descriptor)
        return made

    def whole(self) -> Tensor:
        """Return the whole tensor.

        Raises:
            OSError: see `rows`.
        """
        return self.rows(0, self.shape[0] if self.shape else 1).view(self.shape)

    def copy_to(self, target: Tensor, offsets: Iterable[int]) -> None:
        """Copy the part of the tensor at `offsets` with the shape of `target`, some rows at a time.

        Raises:
            OSError: see `rows`.
        """
        if not target.dim():
            target.copy_(self.whole())
            return
        first, *others = offsets
        row = max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)
        many = max(1, _PIECE // row)
        for start in range(0, len(target), many):
            into = target[start : start + many]
            part = self.rows(first + start, len(into))
            for dimension, offset in enumerate(others, 1):
                part = part.narrow(dimension, offset, into.shape[dimension])
            into.copy_(part)


def stored_tensors(folder: Path) -> dict[str, StoredTensor] | None:
    """Return the tensors of a model folder by name; None if the files are not as transformers expects.

    `model.safetensors` holds all tensors, or `model.safetensors.index.json` names the files.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if single.is_file():
            return _of_file(single)[0]
        written = load_json_object(read_bounded(index))
        names = weight_files(written)
        if names is None:
            return None
        files = {name: _of_file(folder / name)[0] for name in names}
        return {tensor: files[name][tensor] for tensor, name in written["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # The loader of the folder reports the fault.
        return None


def stored_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in files, by name; no tensor is read.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not a safetensors file.
    """
    return {name: tensor.shape for file in files for name, tensor in tensors_in(file)[0].items()}


def tensors_in(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors in a file by name, and the metadata.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a safetensors file.
    """
    try:
        return _of_file(file)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file.name} is not a safetensors file: {error}") from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return all tensors of a file by name, on the host.

    Raises:
        OSError, ValueError: see `tensors_in`; or the tensors are much larger than the file's space on disk, as in a
            sparse file.
    """
    tensors, status = tensors_in(file)[0], file.stat()
    # Some file systems report no blocks, and some compress.
    budget = Budget.of_size(min(status.st_size, 512 * status.st_blocks or status.st_size))
    for name, stored in tensors.items():
        budget.take_array(stored.shape, stored.dtype.itemsize, f"`{name}`")
    return {name: stored.whole() for name, stored in tensors.items()}


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Check that torch can represent a shape.

    Raises:
        ValueError: the shape has too many dimensions, or too large ones.
    """
    if len(shape) > _MOST_DIMENSIONS or math.prod(filter(None, shape)) >= 1 << 62:
        raise ValueError(f"the shape of `{name}` is larger than a tensor can be")


def check_parts(name: str, whole: Sequence[int], parts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Check that parts, given by offsets and sizes, cover each element of a tensor once.

    Args:
        name: the name of the tensor.
        whole: the sizes of the tensor, which no part exceeds.
        parts: its parts.

    Raises:
        ValueError: the parts leave a gap, or overlap.
    """
    solid = [part for part in parts if math.prod(part[1])]
    if sum(math.prod(sizes) for _, sizes in solid) != math.prod(whole):
        raise ValueError(f"a part of `{name}` is missing")
    cut = [at for at, size in enumerate(whole) if any(sizes[at] != size for _, sizes in solid)]
    if len(cut) > _MOST_CUT:
        raise ValueError(f"`{name}` is cut along {len(cut)} of its dimensions, {_MOST_CUT} are the limit")
    # In a partition every corner of a part occurs an even number of times, except the corners of the whole. Together
    # with the right volume, that holds for partitions alone. Comparing parts in pairs would take quadratic time.
    boxes = [*solid, ([0] * len(whole), whole)] if solid else []
    odd: set[tuple[int, ...]] = set()
    for offsets, sizes in boxes:
        odd ^= set(product(*((offsets[at], offsets[at] + sizes[at]) for at in cut)))
    if odd:
        raise ValueError(f"parts of `{name}` overlap")


def below(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `name` and a dot, by the rest of their names."""
    start = f"{name}."
    return {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name into a new file.

    Raises:
        OSError, ValueError: see `TensorFile`.
    """
    described = {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(file, described) as opened:
        for name, tensor in tensors.items():
            opened.write(name, tensor)


def _of_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a file, and its metadata.

    Raises:
        ValueError, KeyError, TypeError: the file is not a safetensors file, or has tensors of an unsupported type.
    """
    header, about, first, size = weights_header(path)
    if any(type(text) is not str for text in about.values()):
        raise ValueError("its metadata are no texts")
    tensors: dict[str, StoredTensor] = {}
    left = size - first
    for name, entry in header.items():
        dtype, shape = _DTYPES[entry["dtype"]], tuple(map(_count, entry["shape"]))
        check_shape(name, shape)
        begin, end = map(_count, entry["data_offsets"])
        # Overlapping tensors would let a small file claim more than it holds.
        left -= end - begin
        if not 0 <= begin <= end <= size - first or left < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the byte range of `{name}` does not fit the file, its shape or its dtype")
        tensors[name] = StoredTensor(path, first + begin, dtype, shape)
    return tensors, about


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number


class Described(NamedTuple):
    """The type and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFile:
    """A context in which the tensors of a file are written one at a time, in any order.

    Args:
        path: the path of the file, which must not exist.
        tensors: the types and shapes of the tensors, by name.
        about: the metadata.

    Raises:
        OSError: the file cannot be written.
        ValueError: the format does not support the type or the name of a tensor.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Described], about: Mapping[str, str] = _ABOUT) -> None:
        self._tensors = tensors
        self._begins: dict[str, int] = {}
        header: dict[str, object] = {_METADATA: dict(about)}
        offset = 0
        for name, (dtype, shape) in tensors.items():
            if dtype not in _NAMES or name == _METADATA:
                raise ValueError(f"a safetensors file cannot hold a tensor `{name}` of {dtype}")
            self._begins[name] = offset
            end = offset + tensors[name].nbytes
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        # Align the data to a multiple of eight bytes.
        text += b" " * (-len(text) % 8)
        self._first = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(self._file.fileno(), self._first + offset)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def left(self) -> Iterator[str]:
        """The names of tensors that have not been written yet."""
        return iter(self._begins)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, converted to its declared type.

        Raises:
            KeyError: the tensor was not declared, or has already been written.
            ValueError: the tensor has another shape.
            OSError: the disk is full.
        """
        dtype, shape = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"`{name}` is {list(tensor.shape)}, not {list(shape)}")
        begin = self._begins.pop(name)
        if tensor.numel():
            flat = tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8)
            self._file.seek(self._first + begin)
            self._file.write(memoryview(cast("Any", flat.numpy())))
