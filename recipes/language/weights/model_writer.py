"""The weights of a model's folder as transformers names its files, written a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from torch import Tensor

from recipes.training.tensor_files import Described, TensorFile

# Bytes of a file, unless a single tensor is larger.
FILE_BYTES: Final = 5 << 30


class ModelWriter:
    """Writes `model.safetensors`, or several files and their index, as transformers names them. A context.

    Args:
        folder: which is there.
        tensors: the tensors that will be written, each once, in any order.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Described]) -> None:
        self._stack = ExitStack()
        self._files: dict[str, TensorFile] = {}
        groups = _groups(tensors)
        named = {_name(number, len(groups)): group for number, group in enumerate(groups)}
        for name, group in named.items():
            file = self._stack.enter_context(TensorFile(folder / name, {tensor: tensors[tensor] for tensor in group}))
            self._files |= dict.fromkeys(group, file)
        if len(groups) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {tensor: name for name, group in named.items() for tensor in group},
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """See `TensorFile.write`."""
        self._files[name].write(name, tensor)

    def finish(self) -> None:
        """Bring everything to the disk.

        Raises:
            ValueError: a tensor was not written.
        """
        left = sorted(name for file in set(self._files.values()) for name in file.left)
        if left:
            raise ValueError(f"`{left[0]}` has no value")
        self._stack.close()


def _groups(tensors: Mapping[str, Described]) -> list[list[str]]:
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
