"""Recordings of transitions on disk: one file per rollout segment, which exists whole or not at all.

    segment-00000001.rlr   magic, version; then a record, in files of earlier versions several
    record                 length (8 bytes), CRC-32 of the payload (4), CRC-32 of these 12 bytes (4), payload
    payload                length of a JSON header (4), the header (name, dtype, shape of each array), the arrays' bytes

All numbers are little-endian. A damaged record ends the reading of its file: it is reported, the file stays unchanged,
and later files are read. Zeros after the last record are space that earlier versions reserved.
"""

from __future__ import annotations

import errno
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

import numpy as np

from recipes.embodied.off_policy.storage import ReplayError, disk_error
from recipes.training.arrays import Array
from rlinf_core.foreign.files import open_regular
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.runners.storage.durable import claimed, write_whole

MAGIC: Final = b"RLRSEG\x00\x01"
SUFFIX: Final = ".rlr"
# The kinds of numpy dtypes in arrays; nothing else is ever read.
_KINDS: Final = "fiub"
_RECORD: Final = struct.Struct("<QII")
_SHORT: Final = struct.Struct("<I")
# The least free disk space when a recording begins; below it a warning is logged later.
_LITTLE: Final = 256 * 2**20
# The file that the recording process locks.
_CLAIM: Final = ".claim"

Record = dict[str, Array]


class Damage(NamedTuple):
    """A position from which on a file cannot be read.

    Attributes:
        file: the file.
        offset: the first unreadable byte.
        size: the number of bytes that follow.
    """

    file: Path
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.file}: a damaged record at byte {self.offset}, {self.size} bytes"


def encode(arrays: Mapping[str, Array]) -> bytes:
    """Return a record of arrays by name.

    Raises:
        ReplayError: an array holds other values than numbers.
    """
    strange = next((name for name, array in arrays.items() if array.dtype.kind not in _KINDS), None)
    if strange is not None:
        raise ReplayError(f"`{strange}` is not numeric and cannot be recorded")
    kept = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()}
    described = [[name, array.dtype.str, list(arrays[name].shape)] for name, array in kept.items()]
    header = json.dumps(described).encode()
    payload = b"".join((_SHORT.pack(len(header)), header, *(array.tobytes() for array in kept.values())))
    sizes = struct.pack("<QI", len(payload), zlib.crc32(payload))
    return sizes + _SHORT.pack(zlib.crc32(sizes)) + payload


def decode(payload: bytes) -> Record:
    """Return the arrays of a payload with a valid checksum, as writable copies.

    Raises:
        ValueError: `encode` did not make the payload.
    """
    (length,) = _SHORT.unpack_from(payload)
    described = cast("list[tuple[str, str, list[int]]]", load_json(bytes(payload[_SHORT.size : _SHORT.size + length])))
    offset, record = _SHORT.size + length, Record()
    for name, kind, shape in described:
        dtype = np.dtype(kind)
        if dtype.kind not in _KINDS:
            raise ValueError(f"`{name}` is of type {kind}")
        count = prod(shape)
        record[name] = np.frombuffer(payload, dtype, count, offset).reshape(shape).copy()
        offset += count * dtype.itemsize
    return record


def read_segments(folder: Path, report: Callable[[Damage], None] = lambda damage: None) -> Iterator[Record]:
    """Yield all records in a folder, oldest first; nothing is changed.

    Args:
        folder: the folder of a `SegmentWriter`, which may be writing to it.
        report: receives a message about each record that cannot be read.
    """
    for file in segments_of(folder):
        size = file.stat().st_size
        with open_regular(file) as stream:
            good = len(MAGIC) if stream.read(len(MAGIC)) == MAGIC else 0
            while good and (record := _next_record(stream, size)) is not None:
                good = stream.tell()
                yield record
            stream.seek(good)
            if any(part.strip(b"\0") for part in iter(lambda: stream.read(2**20), b"")):
                report(Damage(file, good, size - good))


def segments_of(folder: Path) -> list[Path]:
    """Return the files in a folder, oldest first."""
    return sorted(folder.glob(f"segment-*{SUFFIX}"))


def _next_record(stream: IO[bytes], size: int) -> Record | None:
    head = stream.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    length, checksum, own = _RECORD.unpack(head)
    if not length or own != zlib.crc32(head[:12]) or length > size - stream.tell():
        return None
    payload = stream.read(length)
    if zlib.crc32(payload) != checksum:
        return None
    try:
        return decode(payload)
    except (ValueError, TypeError, struct.error):
        return None


class SegmentWriter:
    """Writes each record into a new file, which is on the disk when `append` returns.

    Args:
        folder: the folder, created if missing.
        warn: called once when little space is left.

    Raises:
        ReplayError: the folder cannot be created, its disk has little space, or another process records there.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._warn, self._warned = folder, warn, False
        # Held until `close`, or the end of the process.
        self._claim = ExitStack()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _CLAIM).touch()
            if not self._claim.enter_context(claimed(folder / _CLAIM)):
                raise self._of_another(folder)
            for unfinished in folder.glob(f".segment-*{SUFFIX}.*.part"):
                unfinished.unlink()
            free = shutil.disk_usage(folder).free
            if free < _LITTLE:
                raise OSError(errno.ENOSPC, f"{free // 2**20} MiB of disk are free, and {_LITTLE // 2**20} are needed")
        except OSError as error:
            raise self._failed("cannot be written", error) from error
        self._number = max((int(file.stem.rpartition("-")[2]) for file in segments_of(folder)), default=0)

    def append(self, arrays: Mapping[str, Array]) -> None:
        """Write a record.

        Raises:
            ReplayError: the disk is full or fails; earlier records are kept, and recording can continue once there is
                space.
        """
        record = MAGIC + encode(arrays)
        file = self._folder / f"segment-{self._number + 1:08d}{SUFFIX}"
        # Another writer on a file system without locks.
        if file.exists():
            raise self._of_another(file)
        try:
            write_whole(file, record)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise self._failed("has no space for a record", error) from error
        self._number += 1
        if free < max(_LITTLE, len(record)) and not self._warned:
            self._warned = True
            self._warn(
                f"the disk of {self._folder} has {free // 2**20} MiB left: recording stops when it is full; free disk"
                " space, or move old segments away"
            )

    def close(self) -> None:
        """Let others record here; nothing may be appended afterwards."""
        self._claim.close()

    def _of_another(self, where: Path) -> ReplayError:
        return ReplayError("another run records here", where=str(where), help="give each run a folder of its own")

    def _failed(self, what: str, error: OSError) -> ReplayError:
        kept = "records written so far are kept; free space on that disk, or name another folder"
        return disk_error(f"the recording {what}", self._folder, error, kept)
