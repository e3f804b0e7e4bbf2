"""Columns of a replay buffer that do not fit into its memory: some rows in memory, the others in a file.

The file is mapped and has no name. It goes with its process, however that ends, and two jobs may share a folder. Its
room on the disk is taken when it is made, so that a disk that is too small is reported at the start of a run. Pages of
the file that the kernel keeps in memory are a cache, which it gives up wherever memory is short.
"""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from recipes.embodied.replay.disk import disk_error, take_room
from recipes.embodied.replay.replay_types import ColumnSpec, ReplayError, Rows
from recipes.training.arrays import Array

# Rows that are copied at a time when a column is saved or loaded.
_BLOCK: Final = 1024
# Reads that are announced to the disk after one that had to wait for it.
_ADVISED: Final = 64


class Spill(NamedTuple):
    """The memory of a buffer, and where its other rows go.

    Attributes:
        memory_bytes: the most that its columns take.
        folder: the folder of the files.
    """

    memory_bytes: int
    folder: Path


def rows_in_memory(columns: Mapping[str, ColumnSpec], rows: int, memory_bytes: int) -> dict[str, int]:
    """Return how many of `rows` rows of each column are kept in memory; the smallest columns come first."""
    fitting: dict[str, int] = {}
    left = memory_bytes
    for name, column in sorted(columns.items(), key=lambda item: item[1].nbytes):
        fitting[name] = min(rows, left // column.nbytes) if column.nbytes else rows
        left -= fitting[name] * column.nbytes
    return fitting


class SpilledRows:
    """A column [rows, ...] with its first rows in memory and the others in a file.

    Args:
        rows: the number of rows, all zeros.
        column: a row of it.
        held: rows in memory, fewer than all.
        folder: the folder of the file; it is made where it does not exist.

    Attributes:
        nbytes: bytes in memory.
        spilled: bytes in the file.

    Raises:
        ReplayError: the folder cannot be written, or its disk has no room.
    """

    def __init__(self, rows: int, column: ColumnSpec, held: int, folder: Path) -> None:
        self.shape, self.dtype = column.shape, np.dtype(column.dtype)
        self._held = np.zeros((held, *column.shape), column.dtype)
        self._row = column.nbytes
        self.nbytes, self.spilled = self._held.nbytes, (rows - held) * column.nbytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < self.spilled:
                raise ReplayError(
                    f"the replay buffer needs {self.spilled / 2**30:.1f} GiB of disk, but {free / 2**30:.1f} are free",
                    where=str(folder),
                    help="free disk space, name another `replay.spill_path`, or lower `replay.capacity`",
                )
            self._stream = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives as long as the column
            # A mapping must never be written to where the disk has no room.
            take_room(self._stream.fileno(), self.spilled)
            os.truncate(self._stream.fileno(), self.spilled)
            mapping = mmap.mmap(self._stream.fileno(), self.spilled)
            # Rows are drawn at random: what lies beside one is not read along with it.
            mapping.madvise(mmap.MADV_RANDOM)
        except OSError as error:
            advice = "check that disk, or name another `replay.spill_path`"
            raise disk_error("the replay buffer's file cannot be created", folder, error, advice) from error
        self._mapped = np.frombuffer(mapping, self.dtype).reshape(-1, *self.shape)
        # Reads to come that are announced to the disk.
        self._advised = 0

    def __setitem__(self, rows: Rows, values: Array) -> None:
        """Store values [n, ...] in some rows."""
        held = len(self._held)
        for row, value in zip(rows.tolist(), values, strict=True):
            if row < held:
                self._held[row] = value
            else:
                self._mapped[row - held] = value

    def __getitem__(self, rows: Rows) -> Array:
        """Return some rows, [n, ...]; a copy."""
        values = np.empty((len(rows), *self.shape), self.dtype)
        held, before = len(self._held), _page_faults()
        if self._advised:
            self._advised -= 1
            self._advise(rows[rows >= held])
        # One by one, as numpy would copy twice where rows come from two arrays.
        for place, row in enumerate(rows.tolist()):
            values[place] = self._held[row] if row < held else self._mapped[row - held]
        if _page_faults() > before:
            self._advised = _ADVISED
        return values

    def _advise(self, rows: Rows) -> None:
        """Prefetch rows of the file before reading the first: disks serve many requests at once."""
        for row in rows.tolist():
            offset = (row - len(self._held)) * self._row
            os.posix_fadvise(self._stream.fileno(), offset, self._row, os.POSIX_FADV_WILLNEED)

    def save(self, file: Path, lanes: int, size: int) -> None:
        """Write the first `size` rows of each lane into a file of numpy's, [lanes, size, ...].

        Raises:
            ReplayError: there is no room for it.
        """
        needed = lanes * size * self._row
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(file.parent).free
            if free < needed:
                raise ReplayError(
                    f"a checkpoint of the replay buffer needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} are"
                    " free",
                    where=str(file.parent),
                    help="free disk space, or keep fewer checkpoints",
                )
            with file.open("wb") as stream:
                described = {"descr": self.dtype.str, "fortran_order": False, "shape": (lanes, size, *self.shape)}
                np.lib.format.write_array_header_2_0(stream, described)
                for rows in _blocks(lanes, size, self._lane(lanes)):
                    stream.write(self[rows].data)
        except OSError as error:
            advice = "check the disk of the checkpoints"
            raise disk_error("the replay buffer cannot be saved", file.parent, error, advice) from error

    def load(self, saved: Array) -> None:
        """Load what `save` wrote, or any array [lanes, size, ...]."""
        lanes, size = saved.shape[:2]
        flat = saved.reshape(lanes * size, *self.shape)
        begin = 0
        for rows in _blocks(lanes, size, self._lane(lanes)):
            self[rows] = flat[begin : begin + len(rows)]
            begin += len(rows)

    def _lane(self, lanes: int) -> int:
        return (len(self._held) + self.spilled // self._row) // lanes


def _page_faults() -> int:
    """Return how often this thread has waited for a page from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _blocks(lanes: int, size: int, rows_of_lane: int) -> list[Rows]:
    """Yield the first `size` rows of each lane, in order, in chunks."""
    return [
        lane * rows_of_lane + np.arange(begin, min(begin + _BLOCK, size))
        for lane in range(lanes)
        for begin in range(0, size, _BLOCK)
    ]
