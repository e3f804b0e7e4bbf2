"""Reads demonstrations of any format that is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.demonstrations.demonstrations import Demonstrations, joined
from recipes.demonstrations.hdf5 import read_hdf5
from recipes.demonstrations.lerobot import read_lerobot
from recipes.demonstrations.set_info import HDF5_ENDINGS, STATE


def load_demonstrations(paths: Sequence[str], state_keys: Sequence[str] = ()) -> Demonstrations:
    """Return data sets as one: LeRobotDataset folders, and HDF5 files of LIBERO and robomimic.

    Raises:
        DatasetError: one of them cannot be read, or they differ.
    """
    parts: list[Demonstrations] = []
    for path in map(Path, paths):
        if path.suffix in HDF5_ENDINGS:
            parts.append(read_hdf5(path, state_keys))
        else:
            parts.append(read_lerobot(path, state_keys or (STATE,)))
    return joined(parts)
