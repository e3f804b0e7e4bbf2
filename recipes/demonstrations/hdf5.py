"""Reads HDF5 files of LIBERO, robomimic and Isaac Lab: `data/demo_0/actions`, `data/demo_0/obs/...`, and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import END_ROLES, DatasetError, Flip, Role, column_of, is_depth, needed
from recipes.demonstrations.demonstrations import Camera, Demonstrations, Rows, ends_of, truths
from recipes.demonstrations.hdf5_contents import Attributes, check_contents, check_numbers, take_column
from recipes.training.arrays import Array
from rlinf_core.foreign.budget import Budget, OverBudgetError

# Default states of LIBERO, of robomimic with a Panda, and of Isaac Lab.
_STATES: Final = (
    ("ee_states", "gripper_states"),
    ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
    ("eef_pos", "eef_quat", "gripper_pos"),
)
_NUMBER: Final = re.compile(r"(\d+)$")
# Attributes of a demonstration, or of the file, that give the number of actions.
_SAMPLES, _TOTAL = "num_samples", "total"
# Groups of a demonstration that hold no per-row columns.
_NO_COLUMNS: Final = ("obs", "next_obs", "states", "initial_state", "datagen_info")
_AGREE: Final = "convert the file again, or name the others: `train_data_paths: {path: ..., episodes: [...]}`"


def read_hdf5(
    file: Path,
    state_keys: Sequence[str] = (),
    *,
    columns: Mapping[Role, str] | None = None,
    mask: str | None = None,
) -> Demonstrations:
    """Return the demonstrations of a file; images are read on demand.

    Args:
        file: a file of LIBERO (`*_demo.hdf5`), robomimic or Isaac Lab.
        state_keys: names in `obs` that are concatenated into the states; by default the usual ones of these formats.
        columns: the columns of some roles; those of other roles are found by their usual names.
        mask: the `NAME` of robomimic's `mask/NAME` whose demonstrations are returned; None: all.

    Raises:
        DatasetError: the file is missing, damaged, contradicts itself, claims more than its budget, or has another
            layout.
    """
    h5py = needed("h5py", "an HDF5 file")
    if not file.is_file():
        raise DatasetError("the file does not exist", where=str(file), help="name an HDF5 file of demonstrations")
    try:
        opened = h5py.File(str(file), "r")
    except OSError as error:
        raise DatasetError("the file cannot be read as HDF5", where=str(file), why=str(error)) from error
    try:
        return _File(opened, file, columns or {}).read(state_keys, mask)
    except OverBudgetError as error:
        raise DatasetError(
            f"the file {error}", where=str(file), help="copy or convert the complete file again"
        ) from error
    except OSError as error:
        raise DatasetError("the file cannot be read as HDF5", where=str(file), why=str(error)) from error


class _File:
    """An HDF5 file of demonstrations.

    Args:
        opened: the file, of h5py.
        path: the path of the file.
        columns: the column of some roles.
    """

    def __init__(self, opened: Any, path: Path, columns: Mapping[Role, str]) -> None:
        self._opened, self._where, self._columns = opened, str(path), columns
        self._budget = Budget.of_files(path)
        check_contents(opened, self._where, self._budget)
        data: Any = opened.get("data")
        self._demos: dict[str, Any] = {}
        if data is not None and hasattr(data, "keys"):
            self._demos = {name: data[name] for name in sorted(data, key=_order) if hasattr(data[name], "keys")}
        if not any(map(_observes, self._demos.values())):
            raise DatasetError(
                "the file has no demonstrations",
                where=self._where,
                why="it has no `data/demo_0` with `actions` and `obs`",
                help="robomimic's `dataset_states_to_obs` adds observations to recorded states",
            )
        about: Any = data
        self._attributes = Attributes(about.attrs, f"{self._where}, data")
        self._total = self._attributes.count(_TOTAL)
        self._flip: Flip | None = _orientation(self._attributes.value("macros_image_convention"))

    def read(self, state_keys: Sequence[str], mask: str | None) -> Demonstrations:
        """Return the demonstrations; see `read_hdf5`."""
        actions = {name: self._column(name, demo, "action") for name, demo in self._demos.items()}
        without = next((name for name, column in actions.items() if column is None), None)
        if without is not None:
            raise DatasetError(f"`data/{without}` has no `actions`", where=self._where, help=_AGREE)
        lengths = {name: self._length(name, column) for name, column in actions.items()}
        if self._total is not None and self._total != sum(lengths.values()):
            raise DatasetError(
                f"the file claims {self._total} samples but has {sum(lengths.values())}",
                where=self._where,
                help="copy or convert the complete file again",
            )
        names = self._chosen(mask)
        first = _flat(self._demos[names[0]]["obs"])
        usual = next((keys for keys in _STATES if all(key in first for key in keys)), ())
        keys = list(state_keys) or list(usual)
        for key in keys:
            if key not in first:
                known = ", ".join(f"`{present}`" for present in first)
                raise DatasetError(f"the file has no observation `{key}`", where=self._where, help=f"it has {known}")
        notes: list[str] = []
        cameras = self._cameras(first, notes)
        longer = self._check_lengths(names, lengths, [*keys, *cameras])
        for column in (self._demos[name]["obs"][key] for name in names for key in cameras):
            # Images are read one at a time.
            take_column(column, self._where, self._budget, rows=1)
        if longer:
            notes.append(f"dropped the last observation of {longer} demonstrations, which no action follows")
        if not keys:
            notes.append("there are no states: `data.columns: {state: [...]}` selects their parts from `obs`")
        bounds = np.cumsum([0, *(lengths[name] for name in names)])
        place = _place(self._where, names, bounds)
        for name in names:
            self._check_alike(actions[names[0]], actions[name])
        read = [take_column(actions[name], self._where, self._budget) for name in names]
        values = np.concatenate([column[()].reshape(len(column), -1) for column in read])
        successes = self._successes(names, lengths, place)
        done, terminated, truncated = (self._truths(role, names, lengths, place) for role in END_ROLES)
        return Demonstrations(
            self._where,
            self._attributes.rate(),
            bounds,
            values.astype(np.float32),
            np.concatenate([self._states(name, keys, lengths[name]) for name in names]) if keys else None,
            {key: _camera(self._opened, names, key, bounds, self._where) for key in cameras},
            (self._attributes.instruction() or Path(self._where).stem.removesuffix("_demo").replace("_", " "),),
            np.zeros(int(bounds[-1]), np.int64),
            rewards=self._rewards(names, lengths),
            successes=successes,
            ends=ends_of(bounds[1:] - 1, done=done, terminated=terminated, truncated=truncated, success=successes),
            interventions=self._truths("intervention", names, lengths, place),
            numbers=_numbers(names),
            notes=tuple(notes),
            place=place,
            flip=self._flip,
        )

    def _chosen(self, mask: str | None) -> list[str]:
        if mask is None:
            return list(self._demos)
        masks: Any = self._opened.get("mask", {})
        if mask not in masks:
            known = ", ".join(f"`{mask_name}`" for mask_name in masks) or "none"
            raise DatasetError(f"the file has no `mask/{mask}`", where=self._where, help=f"it has {known}")
        listing: Any = masks[mask]
        if len(getattr(listing, "shape", None) or ()) != 1:
            message = f"`mask/{mask}` is no list of demonstrations"
            raise DatasetError(message, where=self._where, help="create the mask again")
        if len(listing) > len(self._demos):
            message = f"`mask/{mask}` lists {len(listing)} demonstrations of {len(self._demos)}"
            raise DatasetError(message, where=self._where, help="create the mask again")
        listed = {entry.decode() if isinstance(entry, bytes) else str(entry) for entry in listing[()]}
        unknown = next((demo for demo in sorted(listed) if demo not in self._demos), None)
        if unknown is not None or not listed:
            message = f"`mask/{mask}` lists {'nothing' if unknown is None else f'`{unknown}`, which does not exist'}"
            raise DatasetError(message, where=self._where, help="create the mask again")
        return [name for name in self._demos if name in listed]

    def _length(self, name: str, actions: Any) -> int:
        length, said = len(actions) if actions.size else 0, self._attributes_of(name).count(_SAMPLES)
        if said is not None and said != length:
            message = f"`data/{name}` claims {said} samples but has {length} actions"
            raise DatasetError(message, where=self._where, help=_AGREE)
        if not length or not _observes(self._demos[name]):
            missing = "no actions" if not length else "no `obs`"
            raise DatasetError(f"`data/{name}` has {missing}", where=self._where, help=_AGREE)
        return length

    def _attributes_of(self, name: str) -> Attributes:
        return Attributes(self._demos[name].attrs, f"{self._where}, data/{name}")

    def _check_lengths(self, names: Sequence[str], lengths: Mapping[str, int], keys: Sequence[str]) -> int:
        """Check that all demonstrations have the same observations, one per action; return how many have one more."""
        longer, first = 0, self._demos[names[0]]["obs"]
        for name in names:
            observed, counts = self._demos[name]["obs"], set[int]()
            for key in keys:
                if key not in observed or hasattr(observed[key], "keys"):
                    raise DatasetError(f"`data/{name}/obs` has no `{key}`", where=self._where, help=_AGREE)
                check_numbers(observed[key], self._where)
                self._check_alike(first[key], observed[key])
                rows = observed[key].shape[0]
                if rows not in (lengths[name], lengths[name] + 1):
                    message = f"`data/{name}` has {lengths[name]} actions and {rows} observations of `{key}`"
                    raise DatasetError(message, where=self._where, help=_AGREE)
                counts.add(rows)
            if len(counts) > 1:
                message = f"`data/{name}/obs` has columns of {min(counts)} and of {max(counts)} rows"
                raise DatasetError(message, where=self._where, help=_AGREE)
            longer += counts == {lengths[name] + 1}
        return longer

    def _check_alike(self, first: Any, other: Any) -> None:
        """Check that rows of two demonstrations have the same shape, and that both are pictures or neither."""
        if first.shape[1:] != other.shape[1:] or (first.dtype == np.uint8) != (other.dtype == np.uint8):
            one, two = (
                f"{column.name.strip('/')}` is {column.dtype}{list(column.shape[1:])}" for column in (other, first)
            )
            raise DatasetError(f"a row of `{one}; a row of `{two}", where=self._where, help=_AGREE)

    def _cameras(self, observed: Mapping[str, Any], notes: list[str]) -> list[str]:
        """Return the names in `obs` whose rows are color or grey images.

        Raises:
            DatasetError: a camera has images of another type.
        """
        cameras: list[str] = []
        for key, column in observed.items():
            sizes = (column.shape or ())[1:]
            if is_depth(key) and len(sizes) >= 2:
                notes.append(f"dropped `obs/{key}`: policies do not use depth")
            elif len(sizes) == 3 and column.dtype == np.uint8:
                if not {sizes[0], sizes[2]} & {1, 3}:
                    message = f"`obs/{key}` has images of {' x '.join(map(str, sizes))}; RGB has 3 channels"
                    raise DatasetError(message, where=self._where, help="convert the file again, with RGB images")
                cameras.append(key)
            elif len(sizes) == 3 and {sizes[0], sizes[2]} & {1, 3, 4} and min(sizes[0] * sizes[2], sizes[1]) > 8:
                message = f"`obs/{key}` has images of `{column.dtype}`; only uint8, 0 to 255, is supported"
                raise DatasetError(message, where=self._where, help="convert the file again, with uint8 images")
        return cameras

    def _states(self, name: str, keys: Sequence[str], length: int) -> NDArray[np.float32]:
        read = [take_column(self._demos[name]["obs"][key], self._where, self._budget) for key in keys]
        columns = [np.asarray(column[:length], np.float32) for column in read]
        return np.concatenate([column.reshape(length, -1) for column in columns], axis=1)

    def _column(self, name: str, demo: Any, role: Role) -> Any:
        """Return the HDF5 data set of a role in a demonstration; None if there is none."""
        known = [key for key in _flat(demo) if key.split("/")[0] not in _NO_COLUMNS]
        key = column_of(role, known, self._columns, f"{self._where}, data/{name}")
        if key is None:
            return None
        check_numbers(demo[key], self._where)
        return demo[key]

    def _rows(self, role: Role, names: Sequence[str], lengths: Mapping[str, int]) -> Array | None:
        """Return a scalar column over all demonstrations; None if no demonstration has it."""
        columns = {name: self._column(name, self._demos[name], role) for name in names}
        if all(column is None for column in columns.values()):
            return None
        parts: list[Array] = []
        for name, column in columns.items():
            if column is None or column.size != lengths[name]:
                has = "nothing" if column is None else f"{column.size} values"
                message = f"`data/{name}` has {has} for the {role} column of {lengths[name]} actions"
                raise DatasetError(message, where=self._where, help=_AGREE)
            parts.append(np.asarray(take_column(column, self._where, self._budget)[()]).reshape(-1))
        return np.concatenate(parts)

    def _rewards(self, names: Sequence[str], lengths: Mapping[str, int]) -> NDArray[np.float32] | None:
        rows = self._rows("reward", names, lengths)
        return None if rows is None else rows.astype(np.float32)

    def _truths(
        self, role: Role, names: Sequence[str], lengths: Mapping[str, int], place: Callable[[int], str]
    ) -> NDArray[np.bool_] | None:
        rows = self._rows(role, names, lengths)
        if rows is None:
            return None
        return truths(rows, self._column(names[0], self._demos[names[0]], role).name, place)

    def _successes(
        self, names: Sequence[str], lengths: Mapping[str, int], place: Callable[[int], str]
    ) -> NDArray[np.bool_] | None:
        """Return whether the task is solved after each action; Isaac Lab's `success` refers to the last action."""
        rows = self._truths("success", names, lengths, place)
        said = [self._attributes_of(name).solved() for name in names]
        if rows is not None or any(flags is None for flags in said):
            return rows
        solved = np.zeros(sum(lengths[name] for name in names), np.bool_)
        solved[np.cumsum([lengths[name] for name in names]) - 1] = [bool(flags) for flags in said]
        return solved


def _observes(demo: Any) -> bool:
    """Return whether a demonstration has a group of observations."""
    return hasattr(demo.get("obs"), "keys")


def _flat(group: Any, above: str = "") -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name in group:
        item = group[name]
        arrays |= _flat(item, f"{above}{name}/") if hasattr(item, "keys") else {f"{above}{name}": item}
    return arrays


def _place(where: str, names: Sequence[str], bounds: Rows) -> Callable[[int], str]:
    def place(row: int) -> str:
        demo = int(np.searchsorted(bounds, row, side="right")) - 1
        return f"{where}, data/{names[demo]}, row {row - int(bounds[demo])}"

    return place


def _order(name: str) -> tuple[int, str]:
    number = _NUMBER.search(name)
    return (int(number.group(1)) if number else -1, name)


def _numbers(names: Sequence[str]) -> Rows | None:
    """Return the numbers in the names of demonstrations; None if a name has no number or two numbers are equal."""
    numbers = [_order(name)[0] for name in names]
    return np.array(numbers, np.int64) if len(set(numbers)) == len(numbers) and -1 not in numbers else None


def _orientation(convention: Any) -> Flip | None:
    """Return the flip for robosuite's image convention: `opengl` stores the bottom row first."""
    word = convention if isinstance(convention, str) else ""
    return {"opengl": "vertical", "opencv": "none"}.get(word.strip('"').lower())  # pyright: ignore[reportReturnType]


def _camera(opened: Any, names: list[str], key: str, bounds: Rows, where: str) -> Camera:
    """Return a camera of a file, converted from channels-first to channels-last and from grey to RGB."""
    sizes = opened["data"][names[0]]["obs"][key].shape[1:]
    channels_first = sizes[2] not in (1, 3)
    height, width = sizes[1:] if channels_first else sizes[:2]

    def read(rows: Rows) -> NDArray[np.uint8]:
        pictures = np.empty((len(rows), height, width, 3), np.uint8)
        episodes = np.searchsorted(bounds, rows, side="right") - 1
        for place, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
            try:
                picture = opened["data"][names[episode]]["obs"][key][row - bounds[episode]]
                pictures[place] = picture.transpose(1, 2, 0) if channels_first else picture
            except (OSError, KeyError, ValueError) as error:
                message = f"the image in row {row}, `{key}`, cannot be read"
                raise DatasetError(message, where=where, why=str(error)) from error
        return pictures

    return Camera((height, width, 3), read)
