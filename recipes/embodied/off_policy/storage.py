"""Inputs, outputs and columns of a replay buffer, in memory or in files, and their saved form. Imports numpy only.

A file of a running buffer is mapped and unnamed. It vanishes with its process, however that ends, and two jobs may
share a folder. Its pages in memory are a cache, which the kernel reclaims when memory is short.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.training.arrays import Array
from rlinf_core import RLinfError
from rlinf_core.foreign.files import write_fault

Rows: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Flags: TypeAlias = NDArray[np.bool_]
# Arrays [n, ...] by name.
Arrays: TypeAlias = dict[str, Array]


class ReplayError(RLinfError):
    """A replay buffer cannot be made, filled or read."""


class ColumnSpec(NamedTuple):
    """Shape and numpy type of one row of a column, such as `((64, 64, 3), "uint8")`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TransitionSpec:
    """The columns of transitions.

    Attributes:
        observations: the observations by name; images are uint8.
        actions: the shape and type of one action.
    """

    observations: Mapping[str, ColumnSpec]
    actions: ColumnSpec

    @classmethod
    def of(cls, observations: Mapping[str, tuple[tuple[int, ...], str]], action: tuple[int, str]) -> TransitionSpec:
        """Return the columns of an environment, without texts.

        Args:
            observations: `EnvSpec.observations`.
            action: the size of an action, and its type.
        """
        kept = {name: ColumnSpec(tuple(shape), kind) for name, (shape, kind) in observations.items() if kind != "U"}
        return cls(kept, ColumnSpec((action[0],), action[1]))

    @property
    def observation_bytes(self) -> int:
        """Bytes of an observation."""
        return sum(observation.nbytes for observation in self.observations.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: an observation, an action, a reward (4) and flags (1)."""
        return self.observation_bytes + self.actions.nbytes + 5


@dataclass(frozen=True, slots=True)
class Transitions:
    """One step in each of n different environments.

    Attributes:
        observations: the observations before the step, [n, ...], by name.
        actions: [n, A].
        rewards: float32 [n].
        terminations: bool [n], the task ended.
        truncations: bool [n], the episode was truncated: the next observation has a value.
        next_observations: the observations after the step, of the same episode: never the first observation of the next
            episode.
    """

    observations: Mapping[str, Array]
    actions: Array
    rewards: Array
    terminations: Flags
    truncations: Flags
    next_observations: Mapping[str, Array]

    def chosen(self, rows: Array) -> Transitions:
        """Return some of the rows."""
        return Transitions(
            {name: observation[rows] for name, observation in self.observations.items()},
            self.actions[rows],
            self.rewards[rows],
            self.terminations[rows],
            self.truncations[rows],
            {name: observation[rows] for name, observation in self.next_observations.items()},
        )


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """A batch of n transitions of up to k steps each, for critics.

    The target is `rewards + discounts * value(next_observations)`.

    Attributes:
        observations: [n, ...] by name.
        actions: [n, A].
        rewards: float32 [n], the discounted sum of rewards.
        discounts: float32 [n], the discount to the power of the number of steps; 0 where the task ended.
        next_observations: [n, ...] by name, after the last of the steps.
    """

    observations: Arrays
    actions: Array
    rewards: Floats
    discounts: Floats
    next_observations: Arrays

    def __len__(self) -> int:
        return len(self.rewards)


def joined(parts: list[ReplayBatch]) -> ReplayBatch:
    """Return several batches as one, in their order."""
    if len(parts) == 1:
        return parts[0]
    names = parts[0].observations
    return ReplayBatch(
        {name: np.concatenate([part.observations[name] for part in parts]) for name in names},
        np.concatenate([part.actions for part in parts]),
        np.concatenate([part.rewards for part in parts]),
        np.concatenate([part.discounts for part in parts]),
        {name: np.concatenate([part.next_observations[name] for part in parts]) for name in names},
    )


def _take_room(file: int, size: int) -> None:
    """Preallocate disk space for a file of `size` bytes if possible; larger files are unchanged.

    Raises:
        OSError: the disk has no room.
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
            # Writing to a mapping on a full disk would kill the process.
            _take_room(stream.fileno(), size)
            os.truncate(stream.fileno(), size)
            mapping = mmap.mmap(stream.fileno(), size)
        # Rows are drawn at random, so that readahead would be wasted.
        mapping.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapping, column.dtype).reshape(shape)
    except OSError as error:
        advice = "check that disk, or name another `replay.storage`"
        raise disk_error("the replay buffer's file cannot be created", folder, error, advice) from error


def save_column(file: Path, column: Array) -> None:
    """Write a column [lanes, size, ...] into a numpy file.

    Raises:
        ReplayError: the disk has no room.
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
    """Return the columns that `save_column` wrote below a folder, by path, as memory maps.

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
