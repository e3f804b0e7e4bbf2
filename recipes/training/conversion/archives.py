"""Files of `torch.save` and their pickle streams, read as data: tensors in containers, numbers and text.

Such a file is a zip of one pickle stream and the bytes of each storage. A pickle is a program that names functions and
calls them. Here the names stay names. Containers, numbers and text are built directly; every call in the stream goes to
`PickleReader.make`, which knows a few names and builds their values itself. A file can therefore reach only the
reader's own code, whatever Python or torch allow. `torch.load(weights_only=True)` promises the same, but broke the
promise before torch 2.10 (CVE-2025-32434, CVE-2026-24747), and rlinf supports older versions.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, NoReturn, cast

import torch
from torch import Tensor

from recipes.training.tensor_files import check_shape
from rlinf_core.foreign.files import open_regular

# The largest stream in bytes; its values take up to a hundred times as much memory. A tensor of eight ranks takes about
# 1200.
LIMIT: Final = 64 << 20
# Types of keys whose hash takes one step. Hashing nested tuples that repeat their parts takes exponential time.
_KEYS: Final = (str, int)
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES: Final = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES")
)
_EMPTY: Final[dict[str, Callable[[], object]]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS: Final = frozenset(("BINPUT", "LONG_BINPUT"))
_GETS: Final = frozenset(("BINGET", "LONG_BINGET"))
_SKIPPED: Final = frozenset(("PROTO", "FRAME"))


class Name(str):
    """A name of a module's class or function, as in `torch.float32`. Nothing is looked up by it."""

    __slots__ = ()


class PickleReader:
    """A reader of one pickle stream; subclasses define the meaning of names.

    Memory and time are proportional to the length of the stream.
    """

    def make(self, name: Name, arguments: tuple[Any, ...]) -> object:
        """Return the result of a call in the stream.

        Raises:
            ValueError: `name` is unknown, or the arguments do not fit it.
        """
        raise ValueError(f"it calls `{name}`, which is never executed")

    def stored(self, reference: object) -> object:
        """Return the object that a persistent id of the stream refers to.

        Raises:
            ValueError: there is no such object.
        """
        raise ValueError("it refers to another file")

    def build(self, value: object, state: Any) -> None:
        """Give a value of `make` its state.

        Raises:
            ValueError: the value takes no state.
        """
        raise ValueError("it modifies an immutable value")

    def key(self, key: object) -> Any:
        """Return the key of a mapping.

        Raises:
            ValueError: the key is of a type whose hash may take long.
        """
        return key if type(key) in _KEYS else _refuse("a mapping key is neither text nor a number")

    def read(self, stream: bytes) -> object:
        """Return the value that a stream describes.

        Raises:
            ValueError: the stream is damaged, larger than `LIMIT`, or uses an unknown name or operation.
        """
        if len(stream) > LIMIT:
            raise ValueError(f"its pickle is {len(stream)} bytes long; the limit is {LIMIT}")
        try:
            return self._run(stream)
        except (IndexError, KeyError, TypeError, AttributeError, UnicodeError, OverflowError) as error:
            raise ValueError(f"it is damaged: {type(error).__name__}") from error

    def _run(self, stream: bytes) -> object:
        stack: list[Any] = []
        outer: list[list[Any]] = []
        memo: dict[int, object] = {}
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name in _GETS:
                stack.append(memo[cast("int", argument)])
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in _PUTS:
                memo[cast("int", argument)] = stack[-1]
            elif name in _VALUES:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name == "MARK":
                outer.append(stack)
                stack = []
            elif name in ("TUPLE", "SETITEMS", "APPENDS"):
                items, stack = stack, outer.pop()
                self._take(name, stack, items)
            elif name in ("SETITEM", "APPEND"):
                count = 2 if name == "SETITEM" else 1
                items = [stack.pop() for _ in range(count)][::-1]
                self._take(f"{name}S", stack, items)
            elif name in _TUPLES:
                count = _TUPLES[name]
                stack.append(tuple([stack.pop() for _ in range(count)][::-1]))
            elif name == "GLOBAL":
                stack.append(Name(cast("str", argument).replace(" ", ".")))
            elif name == "STACK_GLOBAL":
                last, first = stack.pop(), stack.pop()
                stack.append(Name(f"{_text(first)}.{_text(last)}"))
            elif name in ("REDUCE", "NEWOBJ"):
                arguments, called = stack.pop(), stack.pop()
                if type(called) is not Name or type(arguments) is not tuple:
                    raise ValueError("it calls an object that is not a name")
                stack.append(self.make(called, cast("tuple[Any, ...]", arguments)))
            elif name == "BUILD":
                state = stack.pop()
                self.build(stack[-1], state)
            elif name == "BINPERSID":
                stack.append(self.stored(stack.pop()))
            elif name == "STOP":
                (value,) = stack
                return value
            elif name not in _SKIPPED:
                raise ValueError(f"it contains the opcode `{name}`, which no checkpoint needs")
        raise ValueError("it is truncated")

    def _take(self, name: str, stack: list[Any], items: list[Any]) -> None:
        """Add items to a container: the top of the stack, or a new tuple."""
        if name == "TUPLE":
            stack.append(tuple(items))
        elif name == "APPENDS" and type(stack[-1]) is list:
            stack[-1].extend(items)
        elif name == "SETITEMS" and type(stack[-1]) is dict:
            stack[-1].update(zip(map(self.key, items[::2]), items[1::2], strict=True))
        else:
            raise ValueError("it adds items to an object that is not a container")


# The most parts of a value; a part that occurs twice counts twice.
_MOST_PARTS: Final = 100_000


def check_plain(value: object, types: tuple[type, ...] = ()) -> None:
    """Refuse a value that holds anything but numbers, text, None, containers of these, and `types`.

    Args:
        value: the result of `PickleReader.read`; its parts may occur many times, or contain each other.
        types: further permitted types.

    Raises:
        ValueError: the value has other parts, or too many.
    """
    plain = (type(None), bool, int, float, str, *types)
    pending: list[Any] = [value]
    left = _MOST_PARTS
    while pending:
        part = pending.pop()
        parts: list[Any] = []
        if isinstance(part, (list, tuple)):
            parts = list(cast("list[Any]", part))
        elif isinstance(part, dict):
            parts = list(cast("dict[Any, Any]", part).values())
        elif type(part) is Name or not isinstance(part, plain):
            raise ValueError(f"it contains a `{type(part).__name__}`")
        left -= len(parts)
        if left < 0:
            raise ValueError("it has more objects than a checkpoint can have")
        pending += parts


def _text(value: object) -> str:
    return value if isinstance(value, str) else _refuse("a name is not text")


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)


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
