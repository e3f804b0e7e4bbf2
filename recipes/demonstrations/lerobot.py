"""Reads LeRobotDataset folders, version 3."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.column_statistics import Statistics
from recipes.demonstrations.data_errors import DatasetError, needed
from recipes.demonstrations.demonstrations import Camera, Demonstrations, Rows
from recipes.demonstrations.pictures import decoded, read_video
from recipes.demonstrations.set_files import WHOLE
from recipes.demonstrations.set_info import (
    ACTION,
    DATA_FILES,
    EPISODES,
    EPISODES_FILES,
    IMAGES,
    INTERVENTION,
    REWARD,
    STATE,
    STATISTICS,
    SUCCESS,
    TASKS,
    DatasetInfo,
    read_info,
)


def read_lerobot(folder: Path, state_keys: Sequence[str] = (STATE,)) -> Demonstrations:
    """Return the demonstrations of a folder; pictures are read when they are asked for.

    Args:
        folder: of the data set.
        state_keys: features that make up the states, one behind the other.

    Raises:
        DatasetError: files are missing or damaged, do not agree with each other, or lack a feature that is asked for.
    """
    info = read_info(folder)
    episodes = _episodes(folder, info)
    table = _table(folder, info)
    bounds = np.array([0, *(int(each["dataset_to_index"]) for each in episodes)])
    if len(table) != bounds[-1] or len(table) != info.total_frames or len(episodes) != info.total_episodes:
        raise DatasetError(
            f"the data set says that it has {info.total_frames} rows of {info.total_episodes} episodes, and"
            f" {len(table)} rows of {len(episodes)} are there",
            where=str(folder),
            help=WHOLE,
        )
    _check_times(folder, info, table)
    actions = _numbers(folder, table, info, ACTION)
    states = [_numbers(folder, table, info, key) for key in state_keys if key in info.features or key != STATE]
    tasks = _tasks(folder)
    cameras = {
        name.removeprefix(IMAGES): _camera(folder, info, name, table, episodes, bounds)
        for name in info.cameras
        if name.startswith(IMAGES)
    }
    choices = actions.dtype.kind in "iu"
    return Demonstrations(
        str(folder),
        info.fps,
        bounds,
        actions.astype(np.int64 if choices else np.float32),
        np.concatenate(states, axis=1).astype(np.float32) if states else None,
        cameras,
        tasks,
        np.asarray(table.column("task_index"), np.int64),
        read_statistics(folder),
        _optional(folder, table, info, REWARD, np.float32),
        _optional(folder, table, info, SUCCESS, np.bool_),
        _optional(folder, table, info, INTERVENTION, np.bool_),
    )


def _optional(folder: Path, table: Any, info: DatasetInfo, name: str, dtype: type[np.generic]) -> NDArray[Any] | None:
    """Return a column of single numbers as [N]; None where the data set has none of this name."""
    if name not in info.features or int(np.prod(info.features[name].shape)) != 1:
        return None
    return _numbers(folder, table, info, name)[:, 0].astype(dtype)


def read_statistics(folder: Path) -> dict[str, Statistics] | None:
    """Return `meta/stats.json` of a data set; None without one.

    Raises:
        DatasetError: it cannot be understood.
    """
    file = folder / STATISTICS
    if not file.is_file():
        return None
    try:
        said = cast("dict[str, dict[str, Any]]", json.loads(file.read_text(encoding="utf-8")))
        return {name: {key: np.asarray(value) for key, value in each.items()} for name, each in said.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise DatasetError(
            "the statistics of the data set cannot be understood",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            help="remove the file: statistics are then computed from the rows",
        ) from error


def _read(path: Path) -> Any:
    """Return a Parquet file as a table of Arrow, or raise by its name."""
    parquet = needed("pyarrow.parquet", "a LeRobotDataset")
    if not path.is_file():
        raise DatasetError("a file of the data set is missing", where=str(path), help=WHOLE)
    try:
        return parquet.read_table(str(path), partitioning=None)
    except Exception as error:  # pyarrow has no common base of its errors
        raise DatasetError(
            "a file of the data set cannot be read",
            where=str(path),
            why=f"{type(error).__name__}: {error}".splitlines()[0],
            help=WHOLE,
        ) from error


def _episodes(folder: Path, info: DatasetInfo) -> list[dict[str, Any]]:
    files = sorted(folder.glob(EPISODES_FILES))
    if not files:
        raise DatasetError("the list of episodes is missing", where=str(folder / EPISODES), help=WHOLE)
    rows: list[dict[str, Any]] = []
    for file in files:
        table = _read(file)
        rows += table.select([name for name in table.column_names if not name.startswith("stats/")]).to_pylist()
    rows.sort(key=lambda row: row["episode_index"])
    for row in rows:
        path = info.data_path.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
        if not (folder / path).is_file():
            raise DatasetError(
                f"the file with the rows of episode {row['episode_index']} is missing",
                where=str(folder / path),
                help=WHOLE,
            )
    return rows


def _table(folder: Path, info: DatasetInfo) -> Any:
    arrow = needed("pyarrow", "a LeRobotDataset")
    tables = [_read(file) for file in sorted(folder.glob(DATA_FILES))]
    names = [name for name, each in info.features.items() if each.dtype != "video"]
    for table in tables:
        missing = [name for name in (*names, "index", "task_index", "timestamp") if name not in table.column_names]
        if missing:
            raise DatasetError(f"the rows have no column `{missing[0]}`", where=str(folder), help=WHOLE)
    return arrow.concat_tables(tables).sort_by("index")


def _tasks(folder: Path) -> tuple[str, ...]:
    table = _read(folder / TASKS)
    texts = "task" if "task" in table.column_names else "__index_level_0__"
    if texts not in table.column_names or "task_index" not in table.column_names:
        raise DatasetError("the instructions of the data set cannot be understood", where=str(folder / TASKS))
    numbered = zip(table.column("task_index").to_pylist(), table.column(texts).to_pylist(), strict=True)
    return tuple(text for _, text in sorted(numbered))


def _numbers(folder: Path, table: Any, info: DatasetInfo, name: str) -> NDArray[Any]:
    """Return a column as [N, size]."""
    if name not in info.features:
        known = ", ".join(f"`{each}`" for each in info.features)
        raise DatasetError(f"the data set has no `{name}`", where=str(folder), help=f"it has {known}")
    column = table.column(name).combine_chunks()
    if not len(column):
        raise DatasetError("the data set has no rows", where=str(folder))
    while hasattr(column.type, "value_type"):
        column = column.flatten()
    values = np.asarray(column)
    size = int(np.prod(info.features[name].shape))
    if values.size != len(table) * size:
        raise DatasetError(
            f"`{name}` has {values.size / len(table):g} numbers a row, and its description says {size}",
            where=str(folder),
            help="correct `meta/info.json`, or convert the data set again",
        )
    return values.reshape(len(table), size)


def _check_times(folder: Path, info: DatasetInfo, table: Any) -> None:
    """Check that rows are 1 / fps apart."""
    times, frames = np.asarray(table.column("timestamp")), np.asarray(table.column("frame_index"))
    wrong = np.abs(times - frames / info.fps) > 0.25 / info.fps
    if wrong.any():
        row = int(wrong.argmax())
        raise DatasetError(
            f"row {row} is at {times[row]:.3f} s, and {info.fps} rows in a second would put it at"
            f" {frames[row] / info.fps:.3f} s",
            where=str(folder),
            help="correct `fps` in `meta/info.json`, or convert the data set again",
        )


def _camera(
    folder: Path, info: DatasetInfo, name: str, table: Any, episodes: list[dict[str, Any]], bounds: Rows
) -> Camera:
    shape = cast("tuple[int, int, int]", info.features[name].shape)
    if info.features[name].dtype == "image":
        return _EncodedCamera(shape, str(folder), name, table.column(name))
    files: list[tuple[Path, float]] = []
    for row in episodes:
        try:
            path = info.video_path.format(
                video_key=name,
                chunk_index=row[f"videos/{name}/chunk_index"],
                file_index=row[f"videos/{name}/file_index"],
            )
            files.append((folder / path, float(row[f"videos/{name}/from_timestamp"])))
        except KeyError as error:
            raise DatasetError(f"the list of episodes says nothing of {error}", where=str(folder)) from error
        if not files[-1][0].is_file():
            raise DatasetError(
                f"the video of episode {row['episode_index']}, camera `{name.removeprefix(IMAGES)}`, is missing",
                where=str(files[-1][0]),
                help=WHOLE,
            )
    return _VideoCamera(shape, name, files, bounds, info.fps)


class _EncodedCamera(Camera):
    """Pictures within the Parquet files, kept as they are encoded."""

    def __init__(self, shape: tuple[int, int, int], where: str, name: str, column: Any) -> None:
        super().__init__(shape)
        self._where, self._name, self._column = where, name, column

    def read(self, rows: Rows) -> NDArray[np.uint8]:
        """See `Camera`."""
        found = np.empty((len(rows), *self.shape), np.uint8)
        for place, row in enumerate(rows):
            cell: Mapping[str, Any] = self._column[int(row)].as_py()
            try:
                picture = decoded(cell["bytes"])
            except (DatasetError, TypeError, KeyError) as error:
                raise DatasetError(
                    f"the picture in row {row}, `{self._name}`, cannot be decoded",
                    where=self._where,
                    why=str(error),
                    help=WHOLE,
                ) from error
            found[place] = _of_shape(picture, self.shape, self._where, self._name)
        return found


class _VideoCamera(Camera):
    """Pictures in videos: of each row the frame at its time."""

    def __init__(
        self, shape: tuple[int, int, int], name: str, files: list[tuple[Path, float]], bounds: Rows, fps: int
    ) -> None:
        super().__init__(shape)
        self._name, self._files, self._bounds, self._fps = name, files, bounds, fps

    def read(self, rows: Rows) -> NDArray[np.uint8]:
        """See `Camera`. Rows that follow each other in an episode are decoded together."""
        found = np.empty((len(rows), *self.shape), np.uint8)
        order = np.argsort(rows, kind="stable")
        episodes = np.searchsorted(self._bounds, rows[order], side="right") - 1
        breaks = np.flatnonzero((np.diff(rows[order]) > 1) | (np.diff(episodes) > 0)) + 1
        for places, (episode, *_) in zip(np.split(order, breaks), np.split(episodes, breaks), strict=True):
            self._read_run(found, places, rows[places] - self._bounds[episode], int(episode))
        return found

    def _read_run(self, found: NDArray[np.uint8], places: Rows, frames: Rows, episode: int) -> None:
        """Read frames of an episode, from the first to the last of `frames`, into `found[places]`."""
        file, begin = self._files[episode]
        first, last = int(frames[0]), int(frames[-1])
        pictures: list[NDArray[np.uint8]] = []
        for time, picture in read_video(file, begin + first / self._fps, last - first + 1):
            wanted = begin + (first + len(pictures)) / self._fps
            if abs(time - wanted) > 0.5 / self._fps:
                raise DatasetError(
                    f"frame {first + len(pictures)} of episode {episode} should be at {wanted:.3f} s of its video, and"
                    f" the next one there is at {time:.3f} s",
                    where=str(file),
                    why=f"the data set says {self._fps} frames a second",
                    help="correct `fps` in `meta/info.json`, or convert the data set again",
                )
            pictures.append(_of_shape(picture, self.shape, str(file), self._name))
        if len(pictures) < last - first + 1:
            raise DatasetError(f"the video ends before frame {last} of episode {episode}", where=str(file), help=WHOLE)
        found[places] = np.stack(pictures)[frames - first]


def _of_shape(picture: NDArray[np.uint8], shape: tuple[int, ...], where: str, name: str) -> NDArray[np.uint8]:
    if picture.shape != shape:
        raise DatasetError(
            f"a picture of `{name}` is {picture.shape[0]} x {picture.shape[1]}, and its description says"
            f" {shape[0]} x {shape[1]}",
            where=where,
            help="correct `meta/info.json`, or convert the data set again",
        )
    return picture
