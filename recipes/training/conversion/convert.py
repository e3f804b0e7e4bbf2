"""Conversion of checkpoints of an earlier rlinf: `rlinf runs convert` calls `convert_checkpoint`.

Folders of weights in torch's earlier format are read as data. torch's own reader unpickles both `.metadata`, the index
of the shards, and every non-tensor in a shard, and would thereby run code in a checkpoint. Here `pickles` reads the
index and `archives` the shards, and both are checked against each other.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from recipes.training.conversion.archives import (
    LIMIT,
    FileSlice,
    Name,
    PickleReader,
    load_archive,
    natural_numbers,
    parse_dtype,
    read_archive,
)
from recipes.training.tensor_files import Described, TensorFile, check_parts, check_shape, write_tensors
from recipes.training.weights.shard_files import about_shards, shard_name
from recipes.training.weights.training_state import VERSION
from rlinf_core import CheckpointError
from rlinf_core.foreign.files import check_regular, open_regular, write_fault
from rlinf_core.runners.storage.checkpoint import load_manifest

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
    # The path of the writer's file: it is read but unused. Python 3.13 has moved the class.
    "pathlib.PosixPath": "path",
    "pathlib._local.PosixPath": "path",
}


class _Record:
    """A call in the index, as data: the name, the arguments and the state that follows."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, cast("Any", None)


class _IndexReader(PickleReader):
    """A reader of a checkpoint index, in which `Metadata` and its parts become records."""

    def make(self, name: Name, arguments: tuple[Any, ...]) -> object:
        """Return a record for the kinds of objects that an index consists of."""
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
        """Accept records as keys, too: chunks are looked up by name and offset."""
        return key if type(key) is _Record else super().key(key)


class _Place(NamedTuple):
    """The place of a part of a tensor: its file, its first byte, and its length as an archive of `torch.save`."""

    file: str
    begin: int
    length: int


class _Part(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class EarlierWeights:
    """A component's folder of weights in the earlier format.

    Args:
        folder: the folder with the index and its shards.

    Attributes:
        tensors: types and shapes of the tensors, by name.

    Raises:
        OSError: the index cannot be read.
        ValueError: the index is damaged, is no index, or claims more than the shards hold.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with open_regular(folder / INDEX) as file:
            stream = file.read(LIMIT + 1)
        self.tensors: dict[str, Described] = {}
        self._parts: dict[str, list[_Part]] = {}
        try:
            state = _state(_IndexReader().read(stream), "Metadata")
            self._places = dict(map(_place, _mapping(state["storage_data"]).items()))
            for name, described in _mapping(state["state_dict_metadata"]).items():
                if _kind(described) != "BytesStorageMetadata":
                    self.tensors[_text(name)], self._parts[name] = _tensor(described)
                    check_shape(name, self.tensors[name].shape)
                    check_parts(name, self.tensors[name].shape, self._parts[name])
            self._check_claims()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = str(error) if type(error) is ValueError else f"it is damaged: {type(error).__name__}"
            raise ValueError(f"`{INDEX}` is not a tensor index: {why}") from error

    def _check_claims(self) -> None:
        """Check that tensors are no larger than their parts in the shards."""
        left = {file: (self._folder / file).stat().st_size for file in {place.file for place in self._places.values()}}
        for name, parts in self._parts.items():
            for part in parts:
                place = self._places[name, part.offsets]
                left[place.file] -= place.length
                if math.prod(part.sizes) * self.tensors[name].dtype.itemsize > place.length or left[place.file] < 0:
                    raise ValueError(f"`{name}` is larger than its part of `{place.file}`")

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor.

        Raises:
            OSError: a shard cannot be read.
            ValueError: a shard is damaged, or contradicts the index.
        """
        whole = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
        for offsets, sizes in self._parts[name]:
            value = self._read(name, self._places[name, offsets])
            if not isinstance(value, Tensor) or tuple(value.shape) != sizes or value.dtype != whole.dtype:
                raise ValueError(f"the shape or the type of `{name}` differs from the index")
            whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))] = value
        return whole

    def number(self, name: str) -> int:
        """Return a value that is a whole number.

        Raises:
            OSError, ValueError: see `tensor`.
        """
        place = self._places.get((name, ()))
        value = None if place is None else self._read(name, place)
        if type(value) is not int:
            raise ValueError(f"it has no number `{name}`")
        return value

    def _read(self, name: str, place: _Place) -> object:
        with open_regular(self._folder / place.file) as file:
            try:
                return read_archive(cast("Any", FileSlice(file, place.begin, place.length)))
            except ValueError as error:
                raise ValueError(f"`{place.file}` has no valid `{name}`: {error}") from error


def _tensor(value: object) -> tuple[Described, list[_Part]]:
    state = _state(value, "TensorStorageMetadata")
    dtype, layout, *_ = cast("tuple[Any, ...]", _record(state["properties"], "TensorProperties").state)
    if _kind(layout) != "layout" or layout.arguments != ("torch.strided",):
        raise ValueError("a tensor is not dense")
    size = _size(state["size"])
    parts = [_part(part) for part in cast("list[object]", state["chunks"])]
    for offsets, sizes in parts:
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise ValueError("a part of a tensor has a different number of dimensions")
        if any(at + length > whole for at, length, whole in zip(offsets, sizes, size, strict=True)):
            raise ValueError("a part lies outside its tensor")
    return Described(parse_dtype(dtype), size), parts


def _part(value: object) -> _Part:
    state = _state(value, "ChunkStorageMetadata")
    return _Part(_size(state["offsets"]), _size(state["sizes"]))


def _place(item: tuple[object, object]) -> tuple[tuple[str, tuple[int, ...]], _Place]:
    """Return the name and the offsets of a part, with its place."""
    index, storage = _state(item[0], "MetadataIndex"), _state(item[1], "_StorageInfo")
    begin, length = natural_numbers((storage["offset"], storage["length"]))
    file = _text(storage["relative_path"])
    if not _SHARD.fullmatch(file):
        raise ValueError("a tensor is in a file that is not a shard beside the index")
    if storage.get("transform_descriptors"):
        raise ValueError("its shards are compressed or encrypted")
    offsets = index.get("offset")
    return (_text(index["fqn"]), () if offsets is None else _size(offsets)), _Place(file, begin, length)


def _size(value: object) -> tuple[int, ...]:
    (numbers,) = _record(value, "Size").arguments
    return natural_numbers(numbers)


def _kind(value: object) -> str | None:
    return value.kind if type(value) is _Record else None


def _record(value: object, kind: str) -> _Record:
    if type(value) is not _Record or value.kind != kind:
        raise ValueError(f"a `{kind}` is missing")
    return value


def _state(value: object, kind: str) -> dict[str, Any]:
    return cast("dict[str, Any]", _mapping(_record(value, kind).state))


def _mapping(value: object) -> Mapping[Any, Any]:
    if type(value) is not dict:
        raise ValueError("a mapping is missing")
    return cast("dict[Any, Any]", value)


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("a name is not text")
    return value


# Files of tensors in containers, by name: the state of off-policy learning, and completions.
_ARCHIVES: Final = frozenset({"off_policy.pt", "buffered.pt", "unfinished.pt"})
_OPTIMIZER_SETTINGS: Final = "param_groups"


def convert_checkpoint(checkpoint: Path, into: Path) -> bool:
    """Write the files of a checkpoint into an empty folder: those of an earlier rlinf converted, others as they are.

    Args:
        checkpoint: a folder `global_step_N`, undamaged.
        into: the folder to write, on the same disk: unchanged files are linked, not copied.

    Returns:
        Whether an earlier rlinf wrote any of the files; if not, nothing was written.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    names = [PurePosixPath(name) for name in load_manifest(checkpoint).files]
    targets = _targets(names)
    if all(name == target for name, target in targets.items()):
        return False
    name = PurePosixPath()
    try:
        _check_single(targets.values())
        for name, target in targets.items():
            (into / target.parent).mkdir(parents=True, exist_ok=True)
            if name == target:
                _link(checkpoint, name, into)
            elif name.name == INDEX:
                _convert_weights(checkpoint / name.parent, into / target)
            else:
                write_tensors(into / target, _tensors_of(checkpoint / name))
    except (OSError, ValueError) as error:
        why = write_fault(into, error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            "the checkpoint cannot be converted",
            where=str(checkpoint / name),
            why=why,
            help="free disk space, or copy the checkpoint again from its source; it is as it was",
        ) from error
    return True


def _targets(names: Iterable[PurePosixPath]) -> dict[PurePosixPath, PurePosixPath]:
    """Return the file that each file becomes; the file of an index stands for its whole folder."""
    components = {name.parent for name in names if name.name == INDEX}
    targets: dict[PurePosixPath, PurePosixPath] = {}
    for name in names:
        if name.name == INDEX:
            targets[name] = name.with_name(shard_name(1))
        elif name.name in _ARCHIVES:
            targets[name] = name.with_suffix(".safetensors")
        elif name.parent not in components:
            targets[name] = name
    return targets


def _check_single(targets: Iterable[PurePosixPath]) -> None:
    twice = [str(target) for target, count in Counter(targets).items() if count > 1]
    if twice:
        raise ValueError(f"two of its files would become `{twice[0]}`")


def _convert_weights(folder: Path, file: Path) -> None:
    """Write weights and optimizer state as one shard, without the optimizer's settings: the job file has them."""
    weights = EarlierWeights(folder)
    described = {**weights.tensors, VERSION: Described(torch.int64, ())}
    about = about_shards({name: (0,) * len(tensor.shape) for name, tensor in described.items()}, files=1)
    with TensorFile(file, described, about) as opened:
        for name in weights.tensors:
            opened.write(name, weights.tensor(name))
        opened.write(VERSION, torch.tensor(weights.number(VERSION)))


def _tensors_of(archive: Path) -> dict[str, Tensor]:
    """Return the tensors and whole numbers in a file of `torch.save`, by their path."""
    tensors: dict[str, Tensor] = {}
    left = archive.stat().st_size
    for path, tensor in _tensors(load_archive(archive)):
        if path in tensors:
            raise ValueError(f"it has two values `{path}`")
        # A few bytes can refer to the same tensor again. Numbers have no storage in the file.
        left -= tensor.nbytes if tensor.dim() else 0
        if left < 0:
            raise ValueError(f"its tensors up to `{path}` are larger than the file")
        tensors[path] = tensor
    return tensors


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and whole numbers in mappings, by their path."""
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if key != _OPTIMIZER_SETTINGS:
                yield from _tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Tensor):
        yield path, value
    elif type(value) is int:
        yield path, torch.tensor(value)
    else:
        raise ValueError(f"`{path}` is neither a tensor nor a whole number")


def _link(checkpoint: Path, name: PurePosixPath, into: Path) -> None:
    """Link a file of a checkpoint into `into`.

    Raises:
        OSError: the file is not a regular file.
        ValueError: the file is a link that leads out of the checkpoint.
    """
    file = Path(os.path.realpath(checkpoint / name))
    if not file.is_relative_to(os.path.realpath(checkpoint)):
        raise ValueError("it is a link to a file outside of the checkpoint: put a copy of that file in its place")
    check_regular(file)
    try:
        os.link(file, into / name)
    except OSError:
        # Some file systems have no hard links.
        shutil.copy2(file, into / name)
