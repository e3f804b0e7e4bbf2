"""Reads demonstrations of any supported format."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.demonstrations.columns import DatasetError, Role
from recipes.demonstrations.demonstrations import Demonstrations, joined
from recipes.demonstrations.hdf5 import read_hdf5
from recipes.demonstrations.lerobot.lerobot_set import read_lerobot
from recipes.demonstrations.lerobot.set_info import HDF5_ENDINGS
from rlinf_core.config.sections.values import ensure_here
from rlinf_core.suggest import short_repr


def read_demonstrations(
    path: str,
    state_keys: Sequence[str] = (),
    *,
    columns: Mapping[Role, str] | None = None,
    part: str | None = None,
    pictures: bool = True,
) -> Demonstrations:
    """Return a data set: a LeRobotDataset folder, or an HDF5 file of LIBERO, robomimic or Isaac Lab.

    Args:
        path: the path of the folder or file.
        state_keys: columns that are concatenated into the states; by default the usual ones.
        columns: the columns of some roles; those of other roles are found by their usual names.
        part: a split of LeRobot or a mask of robomimic; None: all episodes.
        pictures: whether images can be read later.

    Raises:
        DatasetError: the data set cannot be read, or contradicts itself.
    """
    ensure_here(path)
    if path.endswith(HDF5_ENDINGS):
        return read_hdf5(Path(path), state_keys, columns=columns, mask=part)
    return read_lerobot(Path(path), state_keys, columns=columns, split=part, pictures=pictures)


def load_demonstrations(paths: Sequence[str | os.PathLike[str]], state_keys: Sequence[str] = ()) -> Demonstrations:
    """Return several data sets as one; see `read_demonstrations`.

    Raises:
        DatasetError: no data set is named, one cannot be read, or two of them do not fit together.
    """
    if isinstance(paths, str | os.PathLike) or not paths:
        help = 'name folders or files in a list: `load_demonstrations(["demonstrations/laptop"])`'
        raise DatasetError(f"`paths` is {short_repr(paths)}, expected a list of data sets", help=help)
    return joined([read_demonstrations(os.fspath(path), state_keys) for path in paths])
