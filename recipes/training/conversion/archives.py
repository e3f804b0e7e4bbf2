"""Files of `torch.save`, read as data: tensors in containers, numbers and text.

Such a file is a zip of one pickle stream and the bytes of each storage. `torch.load` is not used: see `pickles`.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from torch import Tensor

from recipes.training.conversion.pickles import Name, PickleReader, check_plain
from recipes.training.tensor_files import check_shape
from rlinf_core.foreign.files import open_regular

# The header of a zip entry: a signature, and at its end the lengths of name and extra field.
_HEADER: Final = struct.Struct("<4s22xHH")
_DTYPES: Final = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_STORAGES: Final = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    # For types that have no storage class; `_rebuild_tensor_v3` names the type.
    "torch.storage.UntypedStorage": torch.uint8,
}


class FileSlice(io.RawIOBase):
    """A readable, seekable part of a file.

    Args:
        file: the file; it stays open, and its position changes.
        offset: the offset of the part's first byte.
        length: the length of the part, in bytes.
    """

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a place within the part, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        """Read bytes of the part into a buffer, and return their number."""
        view = memoryview(buffer)[: max(0, self._length - self._place)]
        self._file.seek(self._offset + self._place)
        count = cast("int", cast("Any", self._file).readinto(view))
        self._place += count
        return count


def load_archive(file: Path) -> Any:
    """Return the content of a file of `torch.save`, tensors on the host.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not such an archive, or holds something other than tensors, containers, numbers and
            text.
    """
    with open_regular(file) as opened:
        return read_archive(opened)


def read_archive(file: IO[bytes]) -> Any:
    """Return the content of an archive of `torch.save` in an open file, tensors on the host.

    Raises:
        OSError: the file cannot be read.
        ValueError: see `load_archive`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            value = _ArchiveReader(archive, file).whole()
    except (zipfile.BadZipFile, struct.error, NotImplementedError) as error:
        raise ValueError(f"it is not a `torch.save` file, or is damaged: {error}") from error
    check_plain(value, (Tensor,))
    return value


class _ArchiveReader(PickleReader):
    """A reader of the stream of one archive.

    Args:
        archive: the open archive.
        file: the file of the archive, to read its bytes without copies.
    """

    def __init__(self, archive: zipfile.ZipFile, file: IO[bytes]) -> None:
        self._file = file
        entries = archive.infolist()
        self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}
        self._storages: dict[str, Tensor] = {}
        # Compressed records could expand beyond the size of the file.
        if len(self._entries) != len(entries) or any(
            entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries
        ):
            raise ValueError("its records are compressed or have duplicate names")
        # The bytes that records may still take: overlapping records could claim more than the file holds.
        self._left = archive.start_dir

    def whole(self) -> object:
        """Return the content of the archive."""
        if "byteorder" in self._entries and bytes(self._bytes("byteorder").numpy()) != sys.byteorder.encode():
            raise ValueError("it was written on a machine with the opposite byte order")
        return self.read(bytes(self._bytes("data.pkl").numpy()))

    def stored(self, reference: object) -> object:
        """Return a storage: its bytes and the type of its elements."""
        kind, storage, key, _, _ = cast("tuple[Any, ...]", reference)
        if kind != "storage" or type(storage) is not Name or storage not in _STORAGES or type(key) is not str:
            raise ValueError("it refers to an object that is not a tensor storage")
        if key not in self._storages:
            self._storages[key] = self._bytes(f"data/{key}")
        return _Storage(self._storages[key], _STORAGES[storage])

    def make(self, name: Name, arguments: tuple[Any, ...]) -> object:
        """Return a tensor, or an empty mapping for `OrderedDict`."""
        if name == "collections.OrderedDict" and not arguments:
            return {}
        if name == "torch._utils._rebuild_parameter":
            tensor, _, _ = arguments
            return _tensor_only(tensor)
        if name == "torch._utils._rebuild_tensor_v2":
            storage, offset, size, stride, _, _ = arguments
            return _view(storage, None, offset, size, stride)
        if name == "torch._utils._rebuild_tensor_v3":
            storage, offset, size, stride, _, _, kind = arguments
            return _view(storage, parse_dtype(kind), offset, size, stride)
        return super().make(name, arguments)

    def build(self, value: object, state: Any) -> None:
        """Ignore the state of an ordered mapping: metadata of a module, such as its format version."""
        if type(value) is not dict:
            super().build(value, state)

    def _bytes(self, name: str) -> Tensor:
        """Return the bytes of a record, uint8 [n], after checking its CRC."""
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"it has no record `{name}`")
        self._left -= entry.file_size
        if self._left < 0:
            raise ValueError("its records are longer than the file")
        self._file.seek(entry.header_offset)
        header = self._file.read(_HEADER.size)
        mark, name_length, extra_length = _HEADER.unpack(header)
        if mark != b"PK\3\4":
            raise ValueError(f"its record `{name}` is missing")
        self._file.seek(name_length + extra_length, io.SEEK_CUR)
        content = torch.empty(entry.file_size, dtype=torch.uint8)
        view = memoryview(cast("Any", content.numpy()))
        place = 0
        while place < len(view) and (count := cast("Any", self._file).readinto(view[place:])):
            place += count
        if place < len(view) or zlib.crc32(view) != entry.CRC:
            raise ValueError(f"its record `{name}` is damaged")
        return content


class _Storage:
    """The bytes of a storage, and the type of its elements."""

    __slots__ = ("content", "dtype")

    def __init__(self, content: Tensor, dtype: torch.dtype) -> None:
        self.content, self.dtype = content, dtype


def parse_dtype(name: object) -> torch.dtype:
    """Return the dtype that a name such as `torch.float32` denotes.

    Raises:
        ValueError: the name denotes no dtype.
    """
    if type(name) is not Name or name not in _DTYPES:
        raise ValueError(f"`{name}` is not a numeric type")
    return _DTYPES[name]


def _view(storage: object, dtype: torch.dtype | None, offset: Any, size: Any, stride: Any) -> Tensor:
    """Return a tensor view of a storage; its elements must not overlap."""
    if type(storage) is not _Storage:
        raise ValueError("a tensor has no storage")
    dtype = dtype or storage.dtype
    sizes, strides = natural_numbers(size), natural_numbers(stride)
    (first,) = natural_numbers((offset,))
    room, count = len(storage.content) // dtype.itemsize, math.prod(sizes)
    if len(sizes) != len(strides):
        raise ValueError("a tensor's shape and strides differ in length")
    if not count:
        check_shape("a tensor", sizes)
        return torch.empty_strided(sizes, strides, dtype=dtype)
    last = first + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True))
    if last >= room or count > room:
        raise ValueError("a tensor exceeds its storage")
    return storage.content[: room * dtype.itemsize].view(dtype).as_strided(sizes, strides, first)


def natural_numbers(values: object) -> tuple[int, ...]:
    """Return a tuple or list of natural numbers as a tuple.

    Raises:
        ValueError: the value is something else.
    """
    if not isinstance(values, (tuple, list)):
        raise ValueError("a shape is not a list of integers")
    numbers = cast("tuple[Any, ...] | list[Any]", values)
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers) or len(numbers) > 64:
        raise ValueError("a shape has negative or non-integer entries")
    return tuple(numbers)


def _tensor_only(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError("a weight is not a tensor")
    return value
