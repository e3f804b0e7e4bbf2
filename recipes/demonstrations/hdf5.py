"""Reads HDF5 files of LIBERO and robomimic: `data/demo_0/actions`, `data/demo_0/obs/...`, and so on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError, needed
from recipes.demonstrations.demonstrations import Camera, Demonstrations, Rows

# What makes up the states where nothing else is said: of LIBERO, then of robomimic with a Panda.
_STATES: Final = (
    ("ee_states", "gripper_states"),
    ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
)
_NUMBER: Final = re.compile(r"(\d+)$")


def read_hdf5(file: Path, state_keys: Sequence[str] = ()) -> Demonstrations:
    """Return the demonstrations of a file; pictures are read when they are asked for.

    Pictures are as the file has them: those of LIBERO and robomimic stand on their heads where the simulator's
    renderer draws from below (LIBERO's files do).

    Args:
        file: of LIBERO (`*_demo.hdf5`) or robomimic.
        state_keys: names in `obs` that make up the states; by default what is usual for these files.

    Raises:
        DatasetError: the file is missing, damaged, or has another layout.
    """
    h5py = needed("h5py", "an HDF5 file")
    if not file.is_file():
        raise DatasetError("the file is not there", where=str(file), help="name an HDF5 file of demonstrations")
    try:
        opened = h5py.File(str(file), "r")
    except OSError as error:
        raise DatasetError("the file cannot be read as HDF5", where=str(file), why=str(error)) from error
    try:
        data = opened["data"]
        names = sorted((name for name in data if "actions" in data[name]), key=_order)
        first = data[names[0]]["obs"]
    except (KeyError, IndexError) as error:
        raise DatasetError(
            "the file has no demonstrations",
            where=str(file),
            why="it has no `data/demo_0` with `actions` and `obs`",
            help="robomimic's `dataset_states_to_obs` adds observations to recorded states",
        ) from error
    bounds = np.cumsum([0, *(len(data[name]["actions"]) for name in names)])
    usual = next((keys for keys in _STATES if all(key in first for key in keys)), ())
    keys = list(state_keys) or list(usual)
    missing = [key for key in keys if key not in first]
    if missing:
        known = ", ".join(f"`{each}`" for each in first)
        raise DatasetError(f"the file observes no `{missing[0]}`", where=str(file), help=f"it observes {known}")
    pictures = [key for key in first if first[key].dtype == np.uint8 and first[key].ndim == 4]
    attributes = {name: _json(data.attrs.get(name)) for name in ("env_args", "problem_info")}
    rate = attributes["env_args"].get("env_kwargs", {}).get("control_freq")
    return Demonstrations(
        str(file),
        None if rate is None else round(float(rate)),
        bounds,
        np.concatenate([data[name]["actions"][()] for name in names]).astype(np.float32),
        np.concatenate([_states(data[name]["obs"], keys) for name in names]) if keys else None,
        {key: _Hdf5Camera(opened, names, key, bounds, str(file)) for key in pictures},
        (_instruction(attributes, file),),
        np.zeros(int(bounds[-1]), np.int64),
    )


def _order(name: str) -> tuple[int, str]:
    found = _NUMBER.search(name)
    return (int(found.group(1)) if found else -1, name)


def _json(value: Any) -> dict[str, Any]:
    try:
        found: object = json.loads(value) if value is not None else {}
    except (TypeError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _instruction(attributes: dict[str, dict[str, Any]], file: Path) -> str:
    said = attributes["problem_info"].get("language_instruction") or attributes["env_args"].get("env_name")
    if isinstance(said, list):
        said = " ".join(str(each) for each in cast("list[Any]", said))
    return str(said or file.stem.removesuffix("_demo").replace("_", " ")).strip('"')


def _states(observations: Any, keys: Sequence[str]) -> NDArray[np.float32]:
    columns = [np.asarray(observations[key][()], np.float32) for key in keys]
    return np.concatenate([each.reshape(len(each), -1) for each in columns], axis=1)


class _Hdf5Camera(Camera):
    """The pictures of one camera in a file."""

    def __init__(self, opened: Any, names: list[str], key: str, bounds: Rows, where: str) -> None:
        height, width, _ = opened["data"][names[0]]["obs"][key].shape[1:]
        super().__init__((height, width, 3))
        self._opened, self._names, self._key, self._bounds, self._where = opened, names, key, bounds, where

    def read(self, rows: Rows) -> NDArray[np.uint8]:
        """See `Camera`."""
        found = np.empty((len(rows), *self.shape), np.uint8)
        episodes = np.searchsorted(self._bounds, rows, side="right") - 1
        for place, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
            try:
                found[place] = self._opened["data"][self._names[episode]]["obs"][self._key][row - self._bounds[episode]]
            except (OSError, KeyError, ValueError) as error:
                raise DatasetError(
                    f"the picture in row {row}, `{self._key}`, cannot be read", where=self._where, why=str(error)
                ) from error
        return found
