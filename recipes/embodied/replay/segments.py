"""Recordings of transitions on disk: append-only segments that survive a killed process and a full disk.

    segment-00000001.rlr   magic, version; then records back to back
    record                 length (8 bytes), CRC-32 of the payload (4), CRC-32 of these 12 bytes (4), payload
    payload                length of a JSON header (4), the header (name, dtype, shape of each array), the arrays' bytes

All numbers are little-endian. The disk space of a segment is taken when it is begun, so that a disk that fills up is
noticed before anything is recorded that would not find room. What follows the last whole record of a file, a record
torn by a crash or the room that was taken, is cut off when the folder is opened for writing again, and reported. A
damaged record before others that are whole ends its segment: it is reported, the file stays as it is, and the following
segments are read.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, BinaryIO, Final, NamedTuple, cast

import numpy as np

from recipes.embodied.replay.storage import ReplayError, disk_error, take_room
from recipes.training.arrays import Array
from rlinf_core.foreign.files import open_regular
from rlinf_core.foreign.strict_json import load_json
from rlinf_core.runners.storage.durable import write_all

MAGIC: Final = b"RLRSEG\x00\x01"
SUFFIX: Final = ".rlr"
# Numbers that arrays may consist of; nothing else is ever read.
_KINDS: Final = "fiub"
_RECORD: Final = struct.Struct("<QII")
_SHORT: Final = struct.Struct("<I")

Record = dict[str, Array]


class Damage(NamedTuple):
    """A place in a segment from which on it cannot be read.

    Attributes:
        file: the segment.
        offset: the first byte that is not understood.
        size: the number of bytes that follow.
        torn: nothing but a record that was never finished, or unused room, follows.
    """

    file: Path
    offset: int
    size: int
    torn: bool

    def __str__(self) -> str:
        what = "an unfinished record" if self.torn else "a damaged record"
        return f"{self.file}: {what} at byte {self.offset}, {self.size} bytes"


def encode(arrays: Mapping[str, Array]) -> bytes:
    """Return a record of arrays by name.

    Raises:
        ReplayError: an array holds something else than numbers.
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
        ValueError: it was not made by `encode`.
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


def read_segment(file: Path) -> Iterator[Record | Damage]:
    """Yield the records of a segment in order, and finally the damage, if any."""
    for end, record in _records(file):
        if record is not None:
            yield record
        elif end.size:
            yield end


def read_segments(folder: Path, report: Callable[[Damage], None] = lambda damage: None) -> Iterator[Record]:
    """Yield all records in a folder, oldest first; nothing is changed.

    Args:
        folder: the folder of a `SegmentWriter`, which may be writing to it.
        report: receives a message about each record that cannot be read.
    """
    for file in segments_of(folder):
        for item in read_segment(file):
            if isinstance(item, Damage):
                report(item)
            else:
                yield item


def segments_of(folder: Path) -> list[Path]:
    """Return the segments in a folder, oldest first."""
    return sorted(folder.glob(f"segment-*{SUFFIX}"))


def _records(file: Path) -> Iterator[tuple[Damage, Record | None]]:
    """Yield every record with its successor; the last one with None."""
    size = file.stat().st_size
    with open_regular(file) as stream:
        good = len(MAGIC) if stream.read(len(MAGIC)) == MAGIC else 0
        while good:
            record = _next_record(stream, size)
            if record is None:
                break
            good = stream.tell()
            yield Damage(file, good, size - good, torn=True), record
        torn = not good or _is_torn(stream, good, size)
    yield Damage(file, good, size - good, torn), None


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


def _is_torn(stream: IO[bytes], offset: int, size: int) -> bool:
    """Return whether the remainder is one unfinished record: no complete record starts after the one at `offset`."""
    stream.seek(offset)
    head = stream.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return True
    length, _, own = _RECORD.unpack(head)
    if own != zlib.crc32(head[:12]):
        # Without a length the next record cannot be found; room that was not written to is zeros.
        return not stream.read().strip(b"\0")
    stream.seek(min(offset + _RECORD.size + length, size))
    following = stream.read(_RECORD.size)
    return len(following) < _RECORD.size or not any(following)


class SegmentWriter:
    """Appends records to the segments of a folder.

    Every record is on the disk when `append` returns. Opening cuts off what a crash has left unfinished.

    Args:
        folder: is made where it does not exist; one process at a time writes to it.
        segment_bytes: size from which on the next segment is begun; also the room that is taken for one.
        report: receives a message about each record that is cut off or cannot be read.
        warn: called once when there is no room for another segment after this one.

    Raises:
        ReplayError: the folder cannot be written, or its disk has no room for a segment.
    """

    def __init__(
        self,
        folder: Path,
        segment_bytes: int = 256 * 2**20,
        report: Callable[[Damage], None] = lambda damage: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._folder, self._segment_bytes, self._warn = folder, segment_bytes, warn
        self._warned = self._closed = False
        self._stream: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in segments_of(folder):
                self._mend(file, report)
        except OSError as error:
            raise self._failed("cannot be written", error) from error
        self._number = max((int(file.stem.rpartition("-")[2]) for file in segments_of(folder)), default=0)
        self._begin()

    def append(self, arrays: Mapping[str, Array]) -> None:
        """Write a record, and return when it is on the disk.

        Raises:
            ReplayError: there is no room, or the disk fails; all records before are kept, and once there is room
                recording can continue.
        """
        if self._closed:
            raise ReplayError("nothing can be recorded after close()", where=str(self._folder))
        record = encode(arrays)
        full = self._position > len(MAGIC) and self._position + len(record) > self._segment_bytes
        if full:
            self._end()
        stream = self._stream or self._begin()
        try:
            take_room(stream.fileno(), self._position + len(record))
            stream.seek(self._position)
            write_all(stream.fileno(), record)
            os.fsync(stream.fileno())
        except OSError as error:
            raise self._failed("has no space for a record", error) from error
        self._position += len(record)

    def close(self) -> None:
        """Give the room back that is not used."""
        self._closed = True
        self._end()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> BinaryIO:
        """Begin the next segment, and return its stream."""
        self._number += 1
        file = self._folder / f"segment-{self._number:08d}{SUFFIX}"
        try:
            self._stream = stream = file.open("xb", buffering=0)
            take_room(stream.fileno(), self._segment_bytes)
            write_all(stream.fileno(), MAGIC)
            os.fsync(stream.fileno())
            directory = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            self._drop(file)
            raise self._failed("has no space for another segment", error) from error
        self._position = len(MAGIC)
        if free < self._segment_bytes and not self._warned:
            self._warned = True
            self._warn(
                f"the disk of {self._folder} has {free // 2**20} MiB left besides the current segment: recording"
                f" stops after another {self._segment_bytes // 2**20} MiB; free disk space, or move old segments"
                " away"
            )
        return stream

    def _end(self) -> None:
        if self._stream is None:
            return
        self._stream.truncate(self._position)
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream = None

    def _drop(self, file: Path) -> None:
        """Remove a segment that could not be opened."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            file.unlink(missing_ok=True)

    def _mend(self, file: Path, report: Callable[[Damage], None]) -> None:
        """Truncate a file after its last complete record; report losses, and damage that is left alone."""
        damage = list(_records(file))[-1][0]
        if not damage.size:
            return
        unused = _is_zero(file, damage.offset)
        if damage.torn:
            os.truncate(file, damage.offset)
        if not unused:
            report(damage)
        if not file.stat().st_size:
            file.unlink()

    def _failed(self, what: str, error: OSError) -> ReplayError:
        kept = "records written so far are kept; free space on that disk, or name another folder"
        return disk_error(f"the recording {what}", self._folder, error, kept)


def _is_zero(file: Path, offset: int) -> bool:
    """Return whether the rest of a file was never written to."""
    with open_regular(file) as stream:
        stream.seek(offset)
        while part := stream.read(2**20):
            if part.strip(b"\0"):
                return False
    return True
