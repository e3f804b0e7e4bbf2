"""Reads LeRobotDataset folders, versions 2.0, 2.1 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.demonstrations import Camera, Demonstrations, Ends, Statistics, ends_of, truths
from recipes.demonstrations.lerobot.episode_list import Episode, check_places, read_episodes
from recipes.demonstrations.lerobot.lerobot_cameras import CameraVideos, encoded_camera
from recipes.demonstrations.lerobot.lerobot_tables import RowTable, read_instructions, read_rows
from recipes.demonstrations.lerobot.set_info import ORIGIN, STATISTICS, DatasetInfo, read_info
from recipes.demonstrations.names import END_ROLES, FRAME_AGE, Role, column_of
from recipes.training.arrays import Array
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object


def read_lerobot(
    folder: Path,
    state_keys: Sequence[str] = (),
    *,
    columns: Mapping[Role, str] | None = None,
    split: str | None = None,
    pictures: bool = True,
) -> Demonstrations:
    """Return the demonstrations of a folder; images are read on demand.

    Args:
        folder: the folder of the data set.
        state_keys: features that are concatenated into the states; by default `observation.state`.
        columns: the features of some roles; those of other roles are found by their usual names.
        split: the split of `splits` in `meta/info.json`, whose episodes are returned; None: all.
        pictures: whether images can be read later.

    Raises:
        DatasetError: files are missing or damaged, contradict each other, or lack a requested feature.
    """
    info, chosen = read_info(folder), columns or {}
    where = str(folder)
    episodes = read_episodes(folder, info)
    rows = read_rows(folder, info, episodes, pictures=pictures)
    check_places(episodes, info, where)
    bounds = np.cumsum([0, *(episode.length for episode in episodes)])
    actions = _actions(rows, info, info.action(where, chosen))
    states = [rows.numbers(key) for key in info.states(where, state_keys)]
    tasks, task_of = read_instructions(folder, info, rows, episodes)
    colours = info.colours(where)
    successes = _truths(rows, info, "success", chosen, where)
    demonstrations = Demonstrations(
        where,
        info.fps,
        bounds,
        actions,
        np.concatenate(states, axis=1).astype(np.float32) if states else None,
        {camera: _camera(folder, info, name, rows, episodes) for name, camera in colours.items()} if pictures else {},
        tasks,
        task_of,
        read_statistics(folder),
        _reward(rows, info, chosen, where),
        successes,
        _ends(folder, rows, info, bounds, chosen, successes),
        _truths(rows, info, "intervention", chosen, where),
        {
            name.removeprefix(FRAME_AGE): rows.numbers(name)[:, 0].astype(np.float32)
            for name in _single(info)
            if name.startswith(FRAME_AGE)
        },
        np.array([episode.number for episode in episodes]),
        notes=_notes(info, states=bool(states)),
        place=rows.place,
    )
    return demonstrations if split is None else demonstrations.chosen(_numbers_of(info, split, where))


def _actions(rows: RowTable, info: DatasetInfo, name: str) -> Array:
    """Return actions as float32, or as int64 if the description declares integers."""
    values = rows.numbers(name)
    if not info.features[name].dtype.startswith(("int", "uint")):
        return values.astype(np.float32)
    wrong = np.flatnonzero((values != np.rint(values)).any(axis=1))
    if len(wrong):
        row = int(wrong[0])
        raise DatasetError(
            f"`{name}` is {values[row].tolist()}, but its description says `{info.features[name].dtype}`",
            where=rows.place(row),
            help="correct `meta/info.json`, or convert the data set again",
        )
    return values.astype(np.int64)


def _reward(rows: RowTable, info: DatasetInfo, columns: Mapping[Role, str], where: str) -> NDArray[np.float32] | None:
    """Return rewards as [N]; None if the data set has none."""
    name = column_of("reward", _single(info), columns, where)
    return None if name is None else rows.numbers(name)[:, 0].astype(np.float32)


def _truths(
    rows: RowTable, info: DatasetInfo, role: Role, columns: Mapping[Role, str], where: str
) -> NDArray[np.bool_] | None:
    """Return a boolean column as [N]; None if the data set has none."""
    name = column_of(role, _single(info), columns, where)
    return None if name is None else truths(rows.numbers(name)[:, 0], name, rows.place)


def _ends(
    folder: Path,
    rows: RowTable,
    info: DatasetInfo,
    bounds: NDArray[np.int64],
    columns: Mapping[Role, str],
    successes: NDArray[np.bool_] | None,
) -> Ends | None:
    """Return how the episodes end; None if the data set does not say.

    Raises:
        DatasetError: an episode continues after a row that ends it. If two episodes were listed as one, training would
            span the reset between them.
    """
    flags = [_truths(rows, info, role, columns, str(folder)) for role in END_ROLES]
    for role, ended in zip(END_ROLES, flags, strict=True):
        if ended is None:
            continue
        goes_on = ended[:-1] & ~ended[1:]
        goes_on[bounds[1:-1] - 1] = False
        if goes_on.any():
            row = int(np.flatnonzero(goes_on)[0])
            raise DatasetError(
                f"`{column_of(role, _single(info), columns, str(folder))}` of a row is true, but its episode continues"
                " in the list of episodes",
                where=rows.place(row),
                why=f"{int(goes_on.sum())} rows contradict the list",
                help="correct the column or the list of episodes, or convert the data set again",
            )
    done, terminated, truncated = flags
    if truncated is None and _marks_borders(folder):
        done = None
    return ends_of(bounds[1:] - 1, done=done, terminated=terminated, truncated=truncated, success=successes)


def _marks_borders(folder: Path) -> bool:
    """Return whether `rlinf record` wrote the data set. Before it wrote `next.truncated`, its `next.done` was true at
    every end, also where a limit of steps had truncated the episode.
    """
    try:
        return "recorded_by" in load_json_object(read_bounded(folder / ORIGIN))
    except (OSError, ValueError):
        return False


def _single(info: DatasetInfo) -> list[str]:
    return [name for name, feature in info.features.items() if not feature.is_camera and feature.size == 1]


def _notes(info: DatasetInfo, *, states: bool) -> tuple[str, ...]:
    notes = [f"dropped `{name}`: policies use neither depth nor future images" for name in info.unseen]
    others = [name for name in info.features if name.startswith("observation.") and name not in info.cameras]
    if not states and others:
        listed = ", ".join(f"`{name}`" for name in others)
        notes.append(
            f"there is no `observation.state`, so states are dropped ({listed}); `data.columns: {{state: [...]}}`"
            " selects them"
        )
    return tuple(notes)


def _numbers_of(info: DatasetInfo, split: str, where: str) -> list[int]:
    """Return the episode numbers of a split, written `first:end`."""
    known = ", ".join(f"`{name}`" for name in info.splits) or "none"
    if split not in info.splits:
        raise DatasetError(f"the data set has no split `{split}`", where=where, help=f"it has {known}")
    first, _, end = info.splits[split].partition(":")
    try:
        numbers = range(int(first or 0), int(end or info.total_episodes))
    except ValueError as error:
        raise DatasetError(f"the split `{split}` is invalid", where=where, why=str(error)) from error
    if numbers and not 0 <= numbers[0] <= numbers[-1] < info.total_episodes:
        message = f"the split `{split}` is `{info.splits[split]}`, of {info.total_episodes} episodes"
        raise DatasetError(message, where=where, help="correct `splits` in `meta/info.json`")
    return list(numbers)


def read_statistics(folder: Path) -> dict[str, Statistics] | None:
    """Return `meta/stats.json` of a data set; None if there is none.

    Raises:
        DatasetError: the file cannot be parsed.
    """
    file = folder / STATISTICS
    if not file.is_file():
        return None
    try:
        said = cast("dict[str, dict[str, Any]]", load_json_object(read_bounded(file), non_finite=True))
        return {name: {key: np.asarray(value) for key, value in entries.items()} for name, entries in said.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise DatasetError(
            "the statistics of the data set are invalid",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            help="remove the file: statistics are then computed from the rows",
        ) from error


def _camera(folder: Path, info: DatasetInfo, name: str, rows: RowTable, episodes: Sequence[Episode]) -> Camera:
    shape = info.picture_shape(name)
    if info.features[name].dtype == "image":
        return encoded_camera(shape, folder, name, rows.table.column(name))
    return Camera(shape, CameraVideos(shape, name, episodes, info.fps).read)
