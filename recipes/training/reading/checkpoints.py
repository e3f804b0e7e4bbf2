"""Checkpoints in the format of torch.distributed.checkpoint, read as data.

torch's own reader unpickles `.metadata`, the index of the shards, and every value in a shard that is not a tensor: a
checkpoint is a program to it. Here the index is read by `pickles`, the shards by `archives`, and both are held against
each other and against what is loaded. The format stays torch's, so that checkpoints of earlier versions are read, and
other tools read those of this one.

Imports torch.distributed.checkpoint, which takes a second.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from recipes.training.reading.archives import FileSlice, natural_numbers, parse_dtype, read_archive
from recipes.training.reading.pickles import LIMIT, Name, PickleReader, check_plain
from rlinf_core.foreign.files import open_regular

INDEX: Final = ".metadata"
_SHARD: Final = re.compile(r"__\d+_\d+\.distcp")
_FORMAT: Final = "torch.distributed.checkpoint."
_KINDS: Final[dict[str, str]] = {
    **{
        f"{_FORMAT}metadata.{kind}": kind
        for kind in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    f"{_FORMAT}filesystem._StorageInfo": "_StorageInfo",
    "torch.Size": "Size",
    "torch.serialization._get_layout": "layout",
    # Where the writer had it: read, and not used. Python 3.13 has moved the class.
    "pathlib.PosixPath": "path",
    "pathlib._local.PosixPath": "path",
}


class _Record:
    """A call in the index, as data: the name, the arguments and the state that follows."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, cast("Any", None)


class _IndexReader(PickleReader):
    """A reader of a checkpoint index; `Metadata` and its parts become records."""

    def make(self, name: Name, arguments: tuple[Any, ...]) -> object:
        """Return a record, of the kinds of which an index consists."""
        if name not in _KINDS:
            return super().make(name, arguments)
        return _Record(_KINDS[name], arguments)

    def build(self, value: object, state: Any) -> None:
        """Keep the state of a record."""
        if type(value) is not _Record or value.state is not None:
            super().build(value, state)
        else:
            value.state = state

    def key(self, key: object) -> Any:
        """Take records as keys, too: chunks are looked up by name and offset."""
        return key if type(key) is _Record else super().key(key)


def read_index(folder: Path) -> Metadata:
    """Return names, types, sizes and chunks of the tensors in the folder of a component, and which file has them.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is damaged, or something other than an index.
    """
    with open_regular(folder / INDEX) as file:
        stream = file.read(LIMIT + 1)
    try:
        return _metadata(_IndexReader().read(stream))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else f"it is damaged: {type(error).__name__}"
        raise ValueError(f"`{INDEX}` is not a tensor index: {why}") from error


def _metadata(value: object) -> Metadata:
    state = _state(value, "Metadata")
    entries = {_text(name): _entry(described) for name, described in _mapping(state["state_dict_metadata"]).items()}
    stored = {_place(key): _storage(storage) for key, storage in _mapping(state["storage_data"]).items()}
    return Metadata(state_dict_metadata=entries, storage_data=stored, storage_meta=StorageMeta())


def _entry(value: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(value) is _Record and value.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(value, "TensorStorageMetadata")
    dtype, layout, *_ = _values(state["properties"], "TensorProperties")
    if type(layout) is not _Record or layout.kind != "layout" or layout.arguments != ("torch.strided",):
        raise ValueError("a tensor is not dense")
    size = _size(state["size"])
    chunks = [_chunk(part) for part in cast("list[object]", state["chunks"])]
    for chunk in chunks:
        if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
            raise ValueError("a chunk of a tensor has a different number of dimensions")
        if any(at + length > whole for at, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError("a chunk lies outside its tensor")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError("the chunks of a tensor do not cover it")
    return TensorStorageMetadata(TensorProperties(dtype=parse_dtype(dtype)), size, chunks)


def _chunk(value: object) -> ChunkStorageMetadata:
    state = _state(value, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_size(state["offsets"]), sizes=_size(state["sizes"]))


def _place(value: object) -> MetadataIndex:
    state = _state(value, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset))


def _storage(value: object) -> _StorageInfo:
    state = _state(value, "_StorageInfo")
    offset, length = natural_numbers((state["offset"], state["length"]))
    name = _text(state["relative_path"])
    if not _SHARD.fullmatch(name):
        raise ValueError("a tensor is in a file that is not a shard beside the index")
    if state.get("transform_descriptors"):
        raise ValueError("its shards are compressed or encrypted")
    return _StorageInfo(name, offset, length)


def _size(value: object) -> torch.Size:
    if type(value) is not _Record or value.kind != "Size":
        raise ValueError("a size is missing")
    (numbers,) = value.arguments
    return torch.Size(natural_numbers(numbers))


def _state(value: object, kind: str) -> dict[str, Any]:
    if type(value) is not _Record or value.kind != kind:
        raise ValueError(f"a `{kind}` is missing")
    return cast("dict[str, Any]", _mapping(value.state))


def _values(value: object, kind: str) -> tuple[Any, ...]:
    if type(value) is not _Record or value.kind != kind or type(value.state) is not tuple:
        raise ValueError(f"a `{kind}` is missing")
    return cast("tuple[Any, ...]", value.state)


def _mapping(value: object) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError("a mapping is missing")
    return cast("dict[Any, Any]", value)


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("a name is not text")
    return value


class CheckpointReader(StorageReader):
    """A reader of the folder of a component, for torch.distributed.checkpoint.

    Args:
        folder: the folder with the index and its shards.

    Attributes:
        metadata: see `read_index`.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is not an index.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.metadata = read_index(folder)

    # What torch calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the folder stays the same."""

    # Without `kwargs`: torch would fall back to an index of each rank.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the index."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: the index has already been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan from the shards into the planner's tensors and values.

        Raises:
            OSError: a shard cannot be read.
            ValueError: it is damaged, or does not hold what the index says.
        """
        stored = cast("dict[MetadataIndex, _StorageInfo]", self.metadata.storage_data)
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(stored[item.storage_index].relative_path, []).append(item)
        for name, wanted in items.items():
            with open_regular(self.folder / name) as file:
                for item in sorted(wanted, key=lambda item: stored[item.storage_index].offset):
                    info = stored[item.storage_index]
                    try:
                        value = read_archive(cast("Any", FileSlice(file, info.offset, info.length)))
                        _deliver(value, item, planner)
                    except ValueError as error:
                        raise ValueError(f"`{name}` has no valid `{item.storage_index.fqn}`: {error}") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a folder may be one of a component."""
        return os.path.isdir(checkpoint_id)


def _deliver(value: object, item: ReadItem, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, cast("Any", value))
        return
    if not isinstance(value, Tensor):
        raise ValueError("it is not a tensor")
    if any(
        at + length > size for at, length, size in zip(item.storage_offsets, item.lengths, value.size(), strict=True)
    ):
        raise ValueError("its shape differs from the index")
    part = narrow_tensor_by_index(value, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item).detach()
    if target.size() != part.size():
        raise ValueError("its shape differs from the index")
    target.copy_(part)
    planner.commit_tensor(item, target)


class CheckpointPlanner(DefaultLoadPlanner):
    """torch's load plan, with non-tensor values passed as they are instead of pickled."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Put a value into its place.

        Raises:
            ValueError: it is not a number, text, or list of these, or stands where the model has a tensor.
        """
        check_plain(value)
        place = cast("Any", self.original_state_dict)
        *path, last = self.mappings[read_item.dest_index.fqn]
        for step in path:
            place = place[step]
        if isinstance(place[last], Tensor):
            raise ValueError("it is not a tensor")
        place[last] = value
