"""Tensors in safetensors files, read by the row.

The package safetensors maps whole files into memory, so that what was read of them counts as this process's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from recipes.sections.model_folders import weight_files, weights_header
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


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        path: the path of the file.
        begin: its first byte.
        dtype, shape: the type and shape, as it is stored.
    """

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, start: int, count: int) -> Tensor:
        """Return rows of the tensor; of one without dimensions there is one.

        Raises:
            OSError: the file cannot be read, or is shorter than it says.
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


def stored_tensors(folder: Path) -> dict[str, StoredTensor] | None:
    """Return the tensors of a model folder by name; None where its files are not those that transformers would take.

    `model.safetensors` holds all of them, or `model.safetensors.index.json` names the files.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if single.is_file():
            return _of_file(single)
        written = load_json_object(read_bounded(index))
        names = weight_files(written)
        if names is None:
            return None
        files = {name: _of_file(folder / name) for name in names}
        return {tensor: files[name][tensor] for tensor, name in written["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # Its loader says what is wrong.
        return None


def stored_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in files, by name; no tensor is read.

    Raises:
        OSError: a file cannot be read.
        ValueError: one is not a safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            shapes |= {name: tensor.shape for name, tensor in _of_file(file).items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file.name} is not a safetensors file: {error}") from None
    return shapes


def _of_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file.

    Raises:
        ValueError, KeyError, TypeError: it is no such file, or has tensors of another type.
    """
    header, first, size = weights_header(path)
    tensors: dict[str, StoredTensor] = {}
    for name, about in header.items():
        dtype, shape = _DTYPES[about["dtype"]], tuple(map(_count, about["shape"]))
        begin, end = map(_count, about["data_offsets"])
        if not 0 <= begin <= end <= size - first or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the byte range of `{name}` does not fit the file, its shape or its dtype")
        tensors[name] = StoredTensor(path, first + begin, dtype, shape)
    return tensors


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number
