"""The observations of a replay buffer by name: in memory as they are, compressed, or partly in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.replay.images import CompressedImages
from recipes.embodied.replay.replay_types import Arrays, ReplayError, Rows, TransitionSpec
from recipes.embodied.replay.spilling import Spill, SpilledRows, rows_in_memory
from recipes.training.arrays import Array

_OBSERVED: Final = "observations/"
COMPRESSED: Final = "compressed/"
Column: TypeAlias = "Array | CompressedImages | SpilledRows"


class ObservationRows:
    """Columns of observations, [lanes * size, ...] each.

    Args:
        spec: the spec of the transitions.
        lanes: environments.
        size: rows of each.
        image_bytes: compress images; None: keep them as they are.
        spill: keep no more than this in memory; None: everything. Not with `image_bytes`.

    Attributes:
        images: the compressed ones, by name.

    Raises:
        ReplayError: the disk has no room for what is not kept in memory.
    """

    def __init__(
        self, spec: TransitionSpec, lanes: int, size: int, image_bytes: int | None = None, spill: Spill | None = None
    ) -> None:
        self.lanes, self.size = lanes, size
        rows = lanes * size
        kept = dict.fromkeys(spec.observations, rows)
        if spill is not None:
            left = spill.memory_bytes - spec.least_row_bytes * rows
            kept = rows_in_memory(spec.observations, rows, max(0, left))
        self._columns: dict[str, Column] = {}
        for name, column in spec.observations.items():
            if image_bytes is not None and column.is_image:
                self._columns[name] = CompressedImages(rows, column.shape)
            elif spill is not None and kept[name] < rows:
                self._columns[name] = SpilledRows(rows, column, kept[name], spill.folder)
            else:
                self._columns[name] = np.zeros((rows, *column.shape), column.dtype)
        self.images = {name: column for name, column in self._columns.items() if isinstance(column, CompressedImages)}
        self._spilled = {name: column for name, column in self._columns.items() if isinstance(column, SpilledRows)}

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(column.nbytes for column in self._columns.values())

    @property
    def image_bytes(self) -> int:
        """Bytes of compressed images."""
        return sum(image.nbytes for image in self.images.values())

    @property
    def spilled(self) -> int:
        """Bytes in files."""
        return sum(column.spilled for column in self._spilled.values())

    def __setitem__(self, rows: Rows, observations: Mapping[str, Array]) -> None:
        """Store observations, [n, ...] by name, in some rows."""
        for name, column in self._columns.items():
            column[rows] = observations[name]

    def __getitem__(self, rows: Rows) -> Arrays:
        """Return the observations of some rows, [n, ...] by name; copies."""
        return {name: column[rows] for name, column in self._columns.items()}

    def equal(self, rows: Rows, observations: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which rows hold exactly these observations, bool [n]."""
        equal = np.ones(len(rows), np.bool_)
        for name, column in self._columns.items():
            equal &= (column[rows] == observations[name]).reshape(len(rows), -1).all(axis=1)
        return equal

    def drop_images(self, rows: Rows) -> None:
        """Forget the compressed images of some rows."""
        for image in self.images.values():
            image.drop(rows)

    def plain(self) -> dict[str, Array]:
        """Return the columns that are arrays in memory, by the names that they are saved by."""
        return {
            f"{_OBSERVED}{name}": column for name, column in self._columns.items() if isinstance(column, np.ndarray)
        }

    def compressed(self) -> Arrays:
        """Return the compressed images, as they are saved."""
        return {
            f"{COMPRESSED}{name}/{part}": array
            for name, column in self.images.items()
            for part, array in column.save().items()
        }

    def without_rows(self) -> Arrays:
        """Return an array [lanes, 0, ...] for each column that is partly in a file: its name, type and shape."""
        return {
            f"{_OBSERVED}{name}": np.empty((self.lanes, 0, *column.shape), column.dtype)
            for name, column in self._spilled.items()
        }

    def save_spilled(self, folder: Path, size: int) -> None:
        """Write the first `size` rows of each lane of columns that are partly in files, for `spilled_in`.

        Raises:
            ReplayError: there is no room for it.
        """
        for name, column in self._spilled.items():
            column.save(folder / _OBSERVED / f"{name}.npy", self.lanes, size)

    def load(self, state: Mapping[str, Array]) -> None:
        """Take columns that are not arrays in memory; see `plain`, `compressed` and `save_spilled`."""
        for name, images in self.images.items():
            prefix = f"{COMPRESSED}{name}/"
            images.load({part.removeprefix(prefix): array for part, array in state.items() if part.startswith(prefix)})
        for name, column in self._spilled.items():
            column.load(state[f"{_OBSERVED}{name}"])


def spilled_in(folder: Path) -> Arrays:
    """Return the data of `save_spilled` as memory maps of its files.

    Raises:
        ReplayError: a file is damaged.
    """
    columns, arrays = folder / _OBSERVED, Arrays()
    try:
        for file in sorted(columns.rglob("*.npy")):
            name = file.relative_to(columns).with_suffix("").as_posix()
            arrays[f"{_OBSERVED}{name}"] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ReplayError(
            "the saved replay buffer cannot be read",
            where=str(folder),
            why=str(error),
            help="resume from an earlier checkpoint",
        ) from error
    return arrays
