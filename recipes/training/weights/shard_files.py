"""Shards of a component's tensors in safetensors files, for torch.distributed.checkpoint.

The files have the format of torch's `HuggingFaceStorageWriter`, and its reader can read them. But that writer makes two
more copies of a rank's shard in memory; that reader maps files into memory, blocks on a pipe, and does not notice
missing parts.

Imports torch.distributed.checkpoint, which takes a second.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from recipes.sections.model_folders import CONVERT, SHARDS, is_earlier
from recipes.training.tensor_files import Described, StoredTensor, TensorFile, check_parts, tensors_in
from rlinf_core import CheckpointError
from rlinf_core.foreign.strict_json import load_json_object

_OFFSETS: Final = "DCP_SHARDING_INFO"
_FILES: Final = "files"


def shard_name(number: int) -> str:
    """Return the file name of a shard; shards count from 1."""
    return f"shard-{number:05}-model-00001-of-00001.safetensors"


def about_shards(offsets: Mapping[str, tuple[int, ...]], files: int) -> dict[str, str]:
    """Return the metadata of a shard's file: the offset of each part in its tensor and, with several files, their
    number.
    """
    places = {name: {"saved_offsets": list(begin)} for name, begin in offsets.items()}
    about = {"format": "pt", "DCP_VERSION": "1.0", _OFFSETS: json.dumps(places)}
    return about if files == 1 else {**about, _FILES: str(files)}


class ShardWriter(StorageWriter):
    """A writer of a component's folder, with a file for each rank.

    Args:
        folder: the folder; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    # The methods that torch calls.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the folder stays the same."""

    # If this method took `kwargs`, torch would pass the rank; instead the plans are numbered.
    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, each with its number and the number of files."""
        files = sum(bool(plan.items) for plan in plans)
        return [replace(plan, storage_data=(number, files)) for number, plan in enumerate(plans, 1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts of tensors, one at a time.

        Raises:
            OSError: the file cannot be written.
        """
        written: list[WriteResult] = []
        if plan.items:
            number, files = plan.storage_data
            described = {item.index.fqn: _described(item) for item in plan.items}
            about = about_shards({item.index.fqn: tuple(_part(item).offsets) for item in plan.items}, files)
            with TensorFile(self._folder / shard_name(number), described, about) as file:
                for item in plan.items:
                    name = item.index.fqn
                    file.write(name, cast("Tensor", planner.resolve_data(item)))
                    written.append(WriteResult(item.index, described[name].nbytes, None))
        return _done(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: each file describes its own parts."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the folder may belong to a component."""
        return True


class ShardReader(StorageReader):
    """A reader of a component's folder.

    Args:
        folder: the folder with the files of all ranks that wrote.

    Attributes:
        tensors: names, types, sizes and parts of the tensors.

    Raises:
        CheckpointError: an earlier rlinf wrote the folder.
        OSError: a file cannot be read.
        ValueError: there is no file, a file is damaged or missing, or parts of a tensor are missing or overlap.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        files = sorted(folder.glob(SHARDS))
        if not files and any(map(is_earlier, os.listdir(folder))):
            raise CheckpointError(
                "the checkpoint was written by an earlier rlinf",
                where=str(folder),
                why="its weights are pickled, which is no longer read",
                help=CONVERT,
            )
        if not files:
            raise ValueError(f"there is no file `{SHARDS}` in it")
        self._stored: dict[MetadataIndex, StoredTensor] = {}
        self.tensors: dict[str, TensorStorageMetadata] = {}
        for file in files:
            self._add(file, len(files))
        for name, whole in self.tensors.items():
            check_parts(name, whole.size, [(chunk.offsets, chunk.sizes) for chunk in whole.chunks])

    def _add(self, file: Path, files: int) -> None:
        tensors, about = tensors_in(file)
        # A missing file may have held whole tensors that no other file mentions.
        if (written := about.get(_FILES, str(files))) != str(files):
            raise ValueError(f"it has {files} of the {written} files that were written")
        places: dict[str, Any] = load_json_object(about.get(_OFFSETS, "{}"))
        for name, stored in tensors.items():
            offsets = _offsets(places.get(name), stored, file)
            part = ChunkStorageMetadata(torch.Size(offsets), torch.Size(stored.shape))
            end = [begin + length for begin, length in zip(offsets, stored.shape, strict=True)]
            before = self.tensors.setdefault(
                name, TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(end), [])
            )
            if len(before.size) != len(end):
                raise ValueError(f"`{file.name}` has a `{name}` with a different number of dimensions")
            if before.properties.dtype != stored.dtype:
                raise ValueError(f"`{file.name}` has a `{name}` of a different type")
            before.size = torch.Size(map(max, before.size, end))
            # An empty part may have the offsets of another part.
            if math.prod(stored.shape):
                before.chunks.append(part)
                self._stored[MetadataIndex(name, part.offsets)] = stored

    # The methods that torch calls.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the folder stays the same."""

    # If this method took `kwargs`, torch would look for an index per rank.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the metadata that the constructor read."""
        return Metadata(
            state_dict_metadata=cast("Any", self.tensors), storage_data=self._stored, storage_meta=StorageMeta()
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: the constructor has read the headers."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the planner's tensors.

        Raises:
            OSError: a file cannot be read.
        """
        for item in plan.items:
            target = planner.resolve_tensor(item)
            self._stored[item.storage_index].copy_to(target.detach(), item.storage_offsets)
            planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the folder may belong to a component."""
        return os.path.isdir(checkpoint_id)


def _described(item: WriteItem) -> Described:
    data = item.tensor_data
    if data is None:
        raise ValueError(f"`{item.index.fqn}` is not a tensor")
    return Described(data.properties.dtype, tuple(data.chunk.sizes))


def _part(item: WriteItem) -> ChunkStorageMetadata:
    return cast("Any", item.tensor_data).chunk


def _offsets(place: Any, stored: StoredTensor, file: Path) -> list[int]:
    if place is None:
        return [0] * len(stored.shape)
    listed = cast("dict[str, Any]", place).get("saved_offsets") if type(place) is dict else None
    offsets = cast("list[Any]", listed) if type(listed) is list else []
    if len(offsets) != len(stored.shape) or any(type(at) is not int or not 0 <= at < 1 << 62 for at in offsets):
        raise ValueError(f"`{file.name}` does not say where its parts of tensors begin")
    return offsets


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
