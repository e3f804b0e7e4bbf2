"""Reads LeRobotDataset folders, versions 2.0, 2.1 and 3, with images in or beside Parquet files, and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import END_ROLES, FRAME_AGE, DatasetError, Role, column_of
from recipes.demonstrations.demonstrations import Camera, Demonstrations, Ends, Rows, Statistics, ends_of, truths
from recipes.demonstrations.lerobot.episode_list import Episode, check_places, read_episodes, rows_of_videos
from recipes.demonstrations.lerobot.lerobot_tables import RowTable, read_instructions, read_rows
from recipes.demonstrations.lerobot.set_files import WHOLE, videos
from recipes.demonstrations.lerobot.set_info import ORIGIN, STATISTICS, DatasetInfo, read_info
from recipes.demonstrations.pictures import decoded, frames_of, read_video
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
        return _encoded_camera(shape, folder, name, rows.table.column(name))
    return Camera(shape, _CameraVideos(shape, name, episodes, info.fps).read)


# Videos and episodes of a camera that are checked before a run; the others are checked when they are first read.
LOOKED_INTO: Final = 200


def _encoded_camera(shape: tuple[int, int, int], folder: Path, name: str, column: Any) -> Camera:
    """Return a camera with encoded images in the Parquet files, or in files that they name.

    Args:
        shape: (H, W, 3).
        folder: the folder of the data set.
        name: the name of the feature.
        column: the Arrow column, with a struct of `bytes` and `path` for each row.
    """

    def read(rows: Rows) -> NDArray[np.uint8]:
        pictures = np.empty((len(rows), *shape), np.uint8)
        for place, row in enumerate(rows):
            cell: object = column[int(row)].as_py()
            try:
                picture = decoded(_bytes_of(cell, folder))
            except (DatasetError, OSError) as error:
                why = error.why or error.message if isinstance(error, DatasetError) else str(error)
                raise DatasetError(
                    f"the image in row {row}, `{name}`, cannot be decoded",
                    where=str(folder),
                    why=why,
                    help=(error.help if isinstance(error, DatasetError) else None) or WHOLE,
                ) from error
            pictures[place] = _of_shape(picture, shape, str(folder), name)
        return pictures

    return Camera(shape, read)


def _bytes_of(cell: object, folder: Path) -> bytes:
    """Return the bytes of the image file in a cell, or of the one below the data set's folder that it names."""
    parts: Mapping[str, Any] = cast("Mapping[str, Any]", cell) if isinstance(cell, Mapping) else {}
    if parts.get("bytes"):
        return parts["bytes"]
    path = parts.get("path")
    if not path:
        raise DatasetError("the row has neither `bytes` of an image nor the `path` of one")
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise DatasetError(f"`{path}` lies outside the data set")
    return read_bounded(file)


class _CameraVideos:
    """The videos of one camera: a row's image is the frame at its time.

    Args:
        shape: (H, W, 3).
        name: the name of the feature.
        episodes: the episodes, with their videos.
        fps: rows per second.
    """

    def __init__(self, shape: tuple[int, int, int], name: str, episodes: Sequence[Episode], fps: float) -> None:
        self._shape, self._name, self._episodes, self._fps = shape, name, episodes, fps
        self._bounds = np.cumsum([0, *(episode.length for episode in episodes)])
        self._rows = rows_of_videos(episodes, name)
        self._new = set(self._rows)  # videos that have not been read yet

    def read(self, rows: Rows) -> NDArray[np.uint8]:
        """Return the images of some rows; consecutive rows of an episode are decoded together."""
        pictures = np.empty((len(rows), *self._shape), np.uint8)
        order = np.argsort(rows, kind="stable")
        episodes = np.searchsorted(self._bounds, rows[order], side="right") - 1
        breaks = np.flatnonzero((np.diff(rows[order]) > 1) | (np.diff(episodes) > 0)) + 1
        for places, (number, *_) in zip(np.split(order, breaks), np.split(episodes, breaks), strict=True):
            episode = self._episodes[int(number)]
            self._check(episode.videos[self._name].file)
            frames = rows[places] - self._bounds[number]
            first, last = int(frames[0]), int(frames[-1])
            pictures[places] = self._decoded(episode, first, last)[frames - first]
        return pictures

    def _check(self, file: Path) -> None:
        if file in self._new:
            self.check_count(file)
            for episode in self._episodes:
                if episode.videos[self._name].file == file:
                    self.check_ends(episode)
            self._new.discard(file)

    def check_count(self, file: Path) -> None:
        """Check that a video has a frame for each row of its episodes.

        Raises:
            DatasetError: frames are missing, or the video cannot be read.
        """
        count, rows = frames_of(file), self._rows.get(file, 0)
        if count is not None and count != rows:
            raise DatasetError(
                f"the video has {count} frames, but the episodes in it have {rows} rows",
                where=str(file),
                why="the pictures of episodes would be those of others",
                help="copy the complete data set again, or correct the list of episodes in `meta/episodes`",
            )

    def check_ends(self, episode: Episode) -> None:
        """Check that the first and the last frame of an episode have the right times and can be decoded.

        Raises:
            DatasetError: one of the two frames has another time, or cannot be decoded.
        """
        for frame in {0, episode.length - 1}:
            self._decoded(episode, frame, frame)

    def _decoded(self, episode: Episode, first: int, last: int) -> NDArray[np.uint8]:
        """Return some frames of an episode, uint8 [last - first + 1, H, W, 3]."""
        file, begin, _ = episode.videos[self._name]
        run: list[NDArray[np.uint8]] = []
        for time, picture in read_video(file, begin + first / self._fps, last - first + 1):
            wanted = begin + (first + len(run)) / self._fps
            if abs(time - wanted) > 0.5 / self._fps:
                raise DatasetError(
                    f"frame {first + len(run)} of episode {episode.number} should be at {wanted:.3f} s of its video,"
                    f" but the next frame is at {time:.3f} s",
                    where=str(file),
                    why=f"the data set states {self._fps:g} frames per second",
                    help="correct `fps` in `meta/info.json`, or convert the data set again",
                )
            run.append(_of_shape(picture, self._shape, str(file), self._name))
        if len(run) < last - first + 1:
            message = f"the video ends before frame {last} of episode {episode.number}"
            raise DatasetError(message, where=str(file), help=WHOLE)
        return np.stack(run)


def check_videos(folder: Path, info: DatasetInfo, episodes: Sequence[Episode]) -> None:
    """Check that each video has a frame for each row, and that episodes begin and end at the right frames.

    Damage in the middle of an episode is detected only when its frames are decoded.

    Raises:
        DatasetError: frames are missing, damaged, or at other times; or the package `av` is missing.
    """
    for name, files in videos(folder, info).items():
        camera = _CameraVideos(info.picture_shape(name), name, episodes, info.fps)
        for file in files[:LOOKED_INTO]:
            camera.check_count(file)
        for episode in episodes[:LOOKED_INTO]:
            camera.check_ends(episode)


def _of_shape(picture: NDArray[np.uint8], shape: tuple[int, ...], where: str, name: str) -> NDArray[np.uint8]:
    if picture.shape != shape:
        raise DatasetError(
            f"an image of `{name}` is {picture.shape[0]} x {picture.shape[1]}; its description says {shape[0]} x"
            f" {shape[1]}",
            where=where,
            help="correct `meta/info.json`, or convert the data set again",
        )
    return picture
