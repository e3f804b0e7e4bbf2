"""Columns of a replay buffer, in memory or in files, and as they are saved.

A file of a running buffer is mapped and has no name. It goes with its process, however that ends, and two jobs may
share a folder. Pages that the kernel keeps in memory are a cache, which it gives up wherever memory is short.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from recipes.embodied.replay.replay_types import Arrays, ColumnSpec, ReplayError
from recipes.training.arrays import Array
from rlinf_core.foreign.files import write_fault


def take_room(file: int, size: int) -> None:
    """Preallocate disk space for a file of `size` bytes where possible; larger files are unchanged.

    Raises:
        OSError: there is no room.
    """
    if os.fstat(file).st_size >= size:
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def disk_error(message: str, folder: Path, error: OSError, help: str) -> ReplayError:
    """Return the error of a folder that cannot be written."""
    return ReplayError(message, where=str(folder), why=write_fault(folder, error), help=help)


def made_column(rows: int, column: ColumnSpec, folder: Path | None) -> Array:
    """Return a column [rows, ...] of zeros, in a file of a folder, or in memory.

    Raises:
        ReplayError: the folder cannot be written, or its disk has no room.
    """
    shape, size = (rows, *column.shape), rows * column.nbytes
    if folder is None or not size:
        return np.zeros(shape, column.dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(size, folder, "the replay buffer", "name another `replay.storage`, or lower `replay.capacity`")
        with tempfile.TemporaryFile(dir=folder) as stream:
            # A mapping that is written to where the disk has no room kills the process.
            take_room(stream.fileno(), size)
            os.truncate(stream.fileno(), size)
            mapping = mmap.mmap(stream.fileno(), size)
        # Rows are drawn at random: what lies beside one is not read along with it.
        mapping.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapping, column.dtype).reshape(shape)
    except OSError as error:
        advice = "check that disk, or name another `replay.storage`"
        raise disk_error("the replay buffer's file cannot be created", folder, error, advice) from error


def save_column(file: Path, column: Array) -> None:
    """Write a column [lanes, size, ...] into a file of numpy's.

    Raises:
        ReplayError: there is no room for it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _check_room(column.nbytes, file.parent, "a checkpoint of the replay buffer", "keep fewer checkpoints")
        with file.open("wb") as stream:
            described = {"descr": column.dtype.str, "fortran_order": False, "shape": column.shape}
            np.lib.format.write_array_header_2_0(stream, described)
            for lane in column:
                lane.tofile(stream)
    except OSError as error:
        advice = "check the disk of the checkpoints"
        raise disk_error("the replay buffer cannot be saved", file.parent, error, advice) from error


def saved_columns(folder: Path, prefix: str) -> Arrays:
    """Return the columns of `save_column` below a folder, by their paths in it, as maps of the files.

    Raises:
        ReplayError: a file is damaged.
    """
    arrays = Arrays()
    try:
        for file in sorted((folder / prefix).rglob("*.npy")):
            name = file.relative_to(folder).with_suffix("").as_posix()
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ReplayError(
            "the saved replay buffer cannot be read",
            where=str(folder),
            why=str(error),
            help="resume from an earlier checkpoint",
        ) from error
    return arrays


def _check_room(size: int, folder: Path, what: str, help: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        needed = f"{what} needs {size / 2**30:.1f} GiB of disk, but {free / 2**30:.1f} are free"
        raise ReplayError(needed, where=str(folder), help=f"free disk space, or {help}")
