"""Model folders in safetensors, written a tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import torch
from torch import Tensor

# Bytes of a file, unless a single tensor is larger.
FILE_BYTES: Final = 5 << 30
_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Described(NamedTuple):
    """The type and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorWriter:
    """Writes `model.safetensors`, or several files and their index, as transformers names them. A context.

    Args:
        folder: which is there.
        tensors: the tensors that will be written, each once, in any order.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Described]) -> None:
        self._tensors = dict(tensors)
        self._stack = ExitStack()
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        groups = _files(self._tensors)
        named = {_name(number, len(groups)): group for number, group in enumerate(groups)}
        for name, group in named.items():
            file = self._stack.enter_context((folder / name).open("wb"))
            self._places |= _begin(file, {tensor: self._tensors[tensor] for tensor in group})
        if len(groups) > 1:
            total = sum(tensor.nbytes for tensor in self._tensors.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {tensor: name for name, group in named.items() for tensor in group},
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, converted to the type that was announced.

        Raises:
            KeyError: it was not announced, or is written already.
            ValueError: it has another shape.
            OSError: the disk is full.
        """
        described = self._tensors[name]
        if tuple(tensor.shape) != described.shape:
            raise ValueError(f"`{name}` is {list(tensor.shape)}, not {list(described.shape)}")
        file, begin = self._places.pop(name)
        if tensor.numel():
            flat = tensor.detach().to("cpu", described.dtype).contiguous().view(-1).view(torch.uint8)
            file.seek(begin)
            file.write(memoryview(cast("Any", flat.numpy())))

    def finish(self) -> None:
        """Bring everything to the disk.

        Raises:
            ValueError: a tensor was not written.
        """
        if self._places:
            raise ValueError(f"`{min(self._places)}` has no value")
        self._stack.close()


def _files(tensors: Mapping[str, Described]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, described in tensors.items():
        if groups[-1] and size + described.nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += described.nbytes
    return groups


def _name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _begin(file: BinaryIO, tensors: Mapping[str, Described]) -> dict[str, tuple[BinaryIO, int]]:
    """Write the head of a file and its length, and return where each tensor begins."""
    offset = 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    for name, described in tensors.items():
        begins[name] = offset
        offsets = [offset, offset + described.nbytes]
        header[name] = {"dtype": _NAMES[described.dtype], "shape": described.shape, "data_offsets": offsets}
        offset += described.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # What follows begins at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    os.truncate(file.fileno(), 8 + len(text) + offset)
    return {name: (file, 8 + len(text) + begin) for name, begin in begins.items()}
